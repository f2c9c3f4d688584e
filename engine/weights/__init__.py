"""Weights of a model, as its layers ask for them."""
