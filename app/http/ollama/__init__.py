"""Ollama's API: chats and texts translated into chat requests, and its model management."""

from .chat_routes import ollama_router

__all__ = ["ollama_router"]
