"""The ASGI application: Litestar routes inside one `SecurityMiddleware`, served on sockets or in process."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from litestar import Litestar, Response, Router, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.routes import HTTPRoute
from litestar.types import ControllerRouterHandler, Receive, Scope, Send
from litestar.typing import FieldDefinition

from ..services import Services
from .anthropic import anthropic_router
from .auth.guard import Access, default_deny
from .auth.sign_in_routes import sign_in_routes
from .common_routes import adapter_router, common_routes, memory_router
from .mcp_routes import McpSessions, mcp_router
from .ollama import ollama_router
from .openai import openai_router
from .openai_responses import responses_router
from .server.errors import answer
from .server.middleware import SecurityMiddleware
from .server.origin import Cors, HostList
from .server.request import StrictRequest
from .server.sockets import is_loopback

_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANSWER = {
    "description": "An error object",
    "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}},
}
_TEXT_ANSWER = {
    "description": "An error in Ollama's form",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {"error": {"type": "string"}},
            }
        }
    },
}
_LINES = {"schema": {"type": "string", "description": "Lines of JSON, the last one with `done`."}}
_EVENTS = {"schema": {"type": "string", "description": "Server-sent events, the last one `[DONE]`."}}
_EVERYWHERE = ("401", "403", "404", "405", "408", "421", "431", "500", "503")
_WITH_BODY = ("413", "415", "429")


_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                },
                "dependentRequired": {
                    "expires_after[anchor]": ["expires_after[seconds]"],
                    "expires_after[seconds]": ["expires_after[anchor]"],
                },
            }
        }
    },
}
"""Body of `POST /v1/files`, which Litestar does not read from the handler."""


def document(handlers: Sequence[ControllerRouterHandler], version: str) -> bytes:
    """Build the OpenAPI document from a second application: in the served one Litestar would add
    documentation routes of its own.
    """
    config = OpenAPIConfig("llmbox", version, use_handler_docstrings=True)
    # Without `logging_config=None` it would take over the daemon's log.
    app = Litestar(handlers, openapi_config=config, request_class=StrictRequest, logging_config=None)
    schema: dict[str, Any] = app.openapi_schema.to_schema()
    schemas = _schemas(app)
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}, {}]  # no key is needed on the machine itself
    for item in schema["paths"].values():
        for operation in item.values():
            if isinstance(operation, dict):
                _add_answers(operation, schemas)
    if (upload := schema["paths"].get("/v1/files", {}).get("post")) is not None:
        upload["requestBody"] = _UPLOAD
        for status in _WITH_BODY:
            upload["responses"].setdefault(status, _ANSWER)
    return msgspec.json.encode(schema)


def _schemas(app: Litestar) -> dict[str, Any]:
    """Return msgspec's own JSON schemas of the types: Litestar's leave out bounds that are 0."""
    fields = [field for handler in _handlers(app) for field in _fields(handler)]
    kinds = list(dict.fromkeys(kind for field in fields for kind in _structs(field)))
    _, components = msgspec.json.schema_components(kinds, ref_template=f"{_SCHEMAS}{{name}}")
    return {**components, "Error": _ERROR}


def _handlers(app: Litestar) -> Iterator[HTTPRouteHandler]:
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            yield from (h for h in route.route_handlers if h.resolve_include_in_schema())


def _fields(handler: HTTPRouteHandler) -> Iterator[FieldDefinition]:
    yield handler.parsed_fn_signature.return_type
    if handler.parsed_data_field:
        yield handler.parsed_data_field


def _structs(field: FieldDefinition) -> Iterator[type[msgspec.Struct]]:
    if isinstance(field.annotation, type) and issubclass(field.annotation, msgspec.Struct):
        yield field.annotation
    for inner in field.inner_types:
        yield from _structs(inner)


def _add_answers(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    responses = operation["responses"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    ollama = "Ollama" in operation.get("tags", ())
    answer = _TEXT_ANSWER if ollama else _ANSWER
    responses["400"] = answer  # Litestar describes its own routes
    for status in (*_EVERYWHERE, *(_WITH_BODY if body else ())):
        responses.setdefault(status, answer)
    fields = schemas.get(body.get("$ref", "").removeprefix(_SCHEMAS), {}).get("properties", {})
    if "stream" in fields:
        streamed = ("application/x-ndjson", _LINES) if ollama else ("text/event-stream", _EVENTS)
        responses["200"]["content"][streamed[0]] = streamed[1]


class App(Litestar):
    """Litestar inside `SecurityMiddleware`, so that its checks also hold where no route matches."""

    def __init__(self, services: Services, handlers: Sequence[ControllerRouterHandler]) -> None:
        limits = services.settings.limits
        super().__init__(
            handlers,
            guards=[default_deny],
            request_class=StrictRequest,
            exception_handlers={Exception: answer},
            state=State(
                {
                    "services": services,
                    "json_depth": limits.json_depth,
                    "stream_buffer_bytes": limits.stream_buffer_bytes,
                    # The value at the start: a reload changes the setting, not the sockets.
                    "loopback_only": is_loopback(services.settings.server.host),
                    "mcp_sessions": McpSessions(),
                }
            ),
            openapi_config=None,
            logging_config=None,
            request_max_body_size=None,  # `SecurityMiddleware` counts
        )
        hosts = HostList(services.settings.server.allowed_hosts)
        cors = Cors(services.settings.server.cors_origins)
        self.shell = SecurityMiddleware(super().__call__, hosts, cors, limits, services.drain)
        """Application that sockets serve; calls in process reach it by `__call__`."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        """Leave out the plugins for pydantic and attrs: importing these would be a third of the daemon's
        start.
        """
        return [*plugins, MsgspecDIPlugin()]

    async def __call__(self, scope: Scope | Any, receive: Receive | Any, send: Send | Any) -> None:
        await self.shell(scope, receive, send)


def create_app(services: Services, dialects: Sequence[ControllerRouterHandler] = ()) -> App:
    """Build the application. `dialects` are the routes of the APIs. A handler's `opt["access"]` says who may
    use it; a handler without it is closed to everybody.
    """
    routes = [*common_routes, *sign_in_routes, mcp_router, *dialects]
    return App(services, [*routes, _openapi_route(routes, services.version)])


def _openapi_route(routes: Sequence[ControllerRouterHandler], version: str) -> ControllerRouterHandler:
    made: list[bytes] = []
    lock = asyncio.Lock()

    @get("/openapi.json", opt={"access": Access.KNOWN}, include_in_schema=False)
    async def openapi() -> Response[bytes]:
        async with lock:
            if not made:  # takes a fraction of a second: built off the event loop, on the first request
                made.append(await asyncio.to_thread(document, routes, version))
        return Response(made[0], media_type="application/json")

    return openapi


DIALECTS: list[Router] = [
    openai_router,
    responses_router,
    anthropic_router,
    ollama_router,
    memory_router,
    adapter_router,
]
