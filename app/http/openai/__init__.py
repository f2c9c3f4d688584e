"""OpenAI's dialect, with the fields that vLLM's and llama.cpp's clients send as well."""

from .routes import openai_router

__all__ = ["openai_router"]
