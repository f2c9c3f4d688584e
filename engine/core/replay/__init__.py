"""Replay of recorded scheduling, and the cost of its steps."""
