"""Fit of a model on this machine: memory, and expected speed."""
