"""Everything between a socket and a checked request."""
