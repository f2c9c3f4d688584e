"""OpenAI's Responses API, translated into chat requests."""

from .routes import responses_router

__all__ = ["responses_router"]
