"""Settings and where files live."""
