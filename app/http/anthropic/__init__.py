"""Anthropic's Messages API, translated into chat requests."""

from .routes import anthropic_router

__all__ = ["anthropic_router"]
