"""Packed weights kept on disk: the next load maps them instead of packing again. See docs/quantisation.md."""
