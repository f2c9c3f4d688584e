"""Whether a model fits this machine, and how fast it would be."""
