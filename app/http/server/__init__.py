"""HTTP server: everything between a socket and a checked request."""
