"""Ollama's API: chats and texts translated into chat requests, and what its clients ask of models."""

from .routes import ollama_router

__all__ = ["ollama_router"]
