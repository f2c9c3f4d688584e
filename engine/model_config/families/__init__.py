"""Rules and entries of families that need more than an entry in `registry.py`."""
