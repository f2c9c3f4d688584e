"""Data of the dashboard: admin API, event feed, state."""
