"""The text side of a model: tokens to bytes and back, chat templates, stop strings. Knows no engine."""
