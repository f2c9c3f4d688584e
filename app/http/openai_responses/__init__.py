"""OpenAI's Responses API, translated into chat requests. Nothing is stored."""

from .routes import responses_router

__all__ = ["responses_router"]
