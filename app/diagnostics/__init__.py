"""Checks of the whole box and the bundle for bug reports."""
