"""Screens of the dashboard, one module each."""
