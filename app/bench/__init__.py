"""A load generator for any OpenAI-compatible server, and comparisons of llmbox with itself."""
