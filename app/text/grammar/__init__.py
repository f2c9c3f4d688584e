"""Grammars of structured output: JSON schemas, regular expressions, Lark."""
