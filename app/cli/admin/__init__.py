"""Commands that keep a box: keys, settings, request log, database, benchmarks, agents' configurations."""
