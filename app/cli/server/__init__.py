"""Commands that start, stop, install and watch the daemon."""
