"""Inference engine: token ids in, token ids out; no text, no HTTP, no database."""
