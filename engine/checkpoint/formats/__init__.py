"""Formats of quantized weights that other tools publish: a class each, see `registry.py`. No torch."""
