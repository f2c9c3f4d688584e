"""Models by name: on disk, adopted, or under an alias."""
