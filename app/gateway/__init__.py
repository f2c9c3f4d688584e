"""Gateway between a parsed request and the engine: text to token ids and back. It knows no HTTP."""
