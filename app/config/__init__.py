"""Settings, and the locations of files."""
