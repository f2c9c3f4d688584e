"""Helpers without knowledge of llmbox."""
