"""Pages of the panel, one module each."""
