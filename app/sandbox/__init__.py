"""Worker processes with limits, for templates and grammars that repositories and callers bring."""
