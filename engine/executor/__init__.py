"""Building an engine: weights, memory profile, workers."""
