"""One request of the log, told to people: what the cache had, what was kept, as a call, and once more."""
