"""Models by name: on disk, adopted, under an alias."""
