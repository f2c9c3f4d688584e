"""Sandboxed worker processes with limits, for templates, grammars and tokenizers of unknown origin."""
