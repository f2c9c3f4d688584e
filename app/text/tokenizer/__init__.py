"""Tokenizers: loading, checking, encoding in a separate process, decoding."""
