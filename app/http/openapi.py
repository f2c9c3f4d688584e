"""/openapi.json: made from the handlers' types, plus the error answers that every route shares."""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Litestar
from litestar.openapi import OpenAPIConfig
from litestar.types import ControllerRouterHandler

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
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_EVERYWHERE = ("400", "403", "404", "408", "421", "431", "500", "503")
_WITH_BODY = ("413", "415", "429")


def document(handlers: Sequence[ControllerRouterHandler], version: str) -> bytes:
    """From a second application: in the real one Litestar would add documentation routes of its own."""
    config = OpenAPIConfig(title="llmbox", version=version, use_handler_docstrings=True)
    schema: dict[str, Any] = Litestar(handlers, openapi_config=config).openapi_schema.to_schema()
    schema.setdefault("components", {}).setdefault("schemas", {})["Error"] = _ERROR
    for item in schema["paths"].values():
        for operation in item.values():
            if isinstance(operation, dict):
                _add_errors(operation)
    return msgspec.json.encode(schema)


def _add_errors(operation: dict[str, Any]) -> None:
    responses = operation.setdefault("responses", {})
    for status in (*_EVERYWHERE, *(_WITH_BODY if "requestBody" in operation else ())):
        responses[status] = _ANSWER
