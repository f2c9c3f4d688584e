"""Text side of a model: tokenization, chat templates, stop strings, output parsing. Independent of the
engine.
"""
