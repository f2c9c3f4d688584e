"""Packed-weight cache on disk: the next load maps weights instead of packing again (docs/quantization.md)."""
