"""The inference engine. It knows token ids only: no text, no HTTP, no database."""
