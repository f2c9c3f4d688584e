"""Dashboards: thin readers of the daemon's event stream and admin API."""
