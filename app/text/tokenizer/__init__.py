"""Tokenizers: loading, checking, encoding in a process of their own, decoding."""
