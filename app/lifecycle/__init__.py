"""Parts of a daemon's life: one instance, background tasks, drain."""
