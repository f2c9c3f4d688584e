"""Ollama's API for chats and texts, translated into chat requests."""

from .routes import ollama_router

__all__ = ["ollama_router"]
