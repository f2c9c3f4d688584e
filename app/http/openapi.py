"""/openapi.json: routes from Litestar, types from msgspec, and the error answers that every route shares."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.routes import HTTPRoute
from litestar.types import ControllerRouterHandler
from litestar.typing import FieldDefinition

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
    "description": "An error, as Ollama tells it",
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
    """Made from a second application: in the real one Litestar would add documentation routes of its own."""
    config = OpenAPIConfig("llmbox", version, use_handler_docstrings=True)
    # Without `logging_config=None` it would take over the daemon's log.
    app = Litestar(handlers, openapi_config=config, logging_config=None)
    schema: dict[str, Any] = app.openapi_schema.to_schema()
    schemas = _schemas(app)
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}, {}]  # none is needed on the machine itself
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
    """Msgspec's own description of its checks: Litestar's leaves out bounds that are 0."""
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
    responses["400"] = answer  # Litestar describes its own
    for status in (*_EVERYWHERE, *(_WITH_BODY if body else ())):
        responses.setdefault(status, answer)
    fields = schemas.get(body.get("$ref", "").removeprefix(_SCHEMAS), {}).get("properties", {})
    if "stream" in fields:
        streamed = ("application/x-ndjson", _LINES) if ollama else ("text/event-stream", _EVENTS)
        responses["200"]["content"][streamed[0]] = streamed[1]
