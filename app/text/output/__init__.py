"""Thoughts and tool calls in answers: formats of model families, and the parser of streams."""
