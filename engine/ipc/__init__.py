"""Messages between daemon and engine, and the processes at both ends. No torch."""
