"""The daemon's log: writing and reading it."""
