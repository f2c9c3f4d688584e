"""Messages between daemon and engine, their codec, and both ends of the connection."""
