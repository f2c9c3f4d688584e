"""Ollama's API: chats and texts translated into chat requests, and what its clients ask of models."""

from .chat_routes import ollama_router

__all__ = ["ollama_router"]
