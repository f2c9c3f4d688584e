"""The daemon and its command line: HTTP, gateway, engine supervision, store. Never imports torch."""
