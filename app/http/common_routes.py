"""Routes that belong to no dialect."""

import platform
from typing import Any, Literal

import msgspec
from litestar import MediaType, Request, Response, get
from litestar.datastructures import State
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ControllerRouterHandler

from ..metrics.metrics import CONTENT_TYPE
from ..services import Services
from .guard import Access

INDEX = """\
llmbox serves language models from this machine.

OpenAI-compatible API   /v1  (chat/completions, completions, models)
Ollama's API            /api (chat, generate, tags, ps, show)
API description         /openapi.json
Health                  /health, /ready, /metrics, /version
"""
OLLAMA = "Ollama is running"
"""What Ollama's clients look for, to the letter."""


class Health(msgspec.Struct):
    status: Literal["ok"]


class Readiness(msgspec.Struct):
    status: Literal["ready", "not_ready"]
    cause: str


class Version(msgspec.Struct):
    version: str
    python: str


@get("/", media_type=MediaType.TEXT, sync_to_thread=False, opt={"access": Access.LIVENESS}, name="index")
def index(request: Request[Any, Any, State]) -> str:
    """What runs here, for people; to programs what Ollama's clients look for."""
    return INDEX if "text/html" in request.headers.get("accept", "") else OLLAMA


@get("/health", sync_to_thread=False, opt={"access": Access.LIVENESS}, name="health")
def health() -> Health:
    """The daemon's loop answers."""
    return Health("ok")


@get(
    "/ready",
    sync_to_thread=False,
    opt={"access": Access.KNOWN},
    name="ready",
    responses={503: ResponseSpec(Readiness, description="The named cause", generate_examples=False)},
)
def ready(request: Request[Any, Any, State]) -> Response[Readiness]:
    """Whether the loaded engines answer; 503 names the cause."""
    services: Services = request.app.state.services
    if services.drain.draining:
        is_ready, cause = False, "draining: the daemon is shutting down"
    else:
        is_ready, cause = services.engines.readiness()
    body = Readiness("ready" if is_ready else "not_ready", cause)
    return Response(body) if is_ready else Response(body, status_code=503, headers={"Retry-After": "1"})


@get("/metrics", media_type=CONTENT_TYPE, sync_to_thread=False, opt={"access": Access.READ}, name="metrics")
def metrics(request: Request[Any, Any, State]) -> bytes:
    """Prometheus text under vLLM's names."""
    services: Services = request.app.state.services
    return services.metrics.render()


@get("/version", sync_to_thread=False, opt={"access": Access.KNOWN}, name="version")
def version(request: Request[Any, Any, State]) -> Version:
    services: Services = request.app.state.services
    return Version(services.version, platform.python_version())


common_routes: list[ControllerRouterHandler] = [index, health, ready, metrics, version]
