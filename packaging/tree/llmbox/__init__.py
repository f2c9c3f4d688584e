"""llmbox: serve language models on one box, on an inference engine of its own."""

__version__ = "0.1.0"
