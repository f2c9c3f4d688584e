"""The daemon's life: one instance, its sockets, its log, its signals."""
