"""Embedding models and rerankers: encoders of the BERT family, and what their folders declare."""
