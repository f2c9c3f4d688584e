"""Recurrent layers in config.json."""
