"""Log of the daemon: writing and reading."""
