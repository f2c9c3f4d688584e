"""Life cycle of a daemon: instance lock, background tasks, drain."""
