"""Inspection of one logged request: prefix cache, kept content, the request as a command, and replay."""
