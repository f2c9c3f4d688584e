"""Settings of other programs that use this daemon."""
