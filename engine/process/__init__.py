"""Programs that run as engine and worker processes."""
