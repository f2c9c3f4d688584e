"""What the dashboard reads: API, event feed, state."""
