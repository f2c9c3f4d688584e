"""Speculative decoding: proposers of draft tokens, the choice among them, and their way into steps."""
