"""Daemon process: composition, sockets, start, serving and shutdown."""
