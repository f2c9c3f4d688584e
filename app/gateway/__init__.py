"""From text to token ids and back: everything between a parsed request and the engine. It knows no HTTP."""
