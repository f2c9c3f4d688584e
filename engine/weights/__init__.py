"""Weight loading: sources from which layers request packed weights."""
