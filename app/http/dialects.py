"""List of the public API dialects. The admin API and the panel stand beside them."""

from litestar import Router

from .anthropic import anthropic_router
from .common_routes import memory_router
from .ollama import ollama_router
from .openai import openai_router
from .openai_responses import responses_router

DIALECTS: list[Router] = [openai_router, responses_router, anthropic_router, ollama_router, memory_router]
