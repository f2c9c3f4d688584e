"""Request class of the handlers: strict JSON, an id, and the connection it came over."""

import asyncio
from typing import Any
from urllib.parse import parse_qsl

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.types import Scope

from ...errors import ApiError
from . import strict_json

LOCAL = "llmbox.local"
"""Key in `scope["extensions"]`: the connection came over our unix socket from our own user."""

CALLER = "llmbox.caller"
"""Key in `scope["extensions"]`: the identity for which the daemon itself asks (`in_process.py`)."""

_BIG_BODY = 128 * 1024


class StrictRequest(Request[Any, Any, State]):
    """Request that decodes the body into the type of the handler's `data` parameter, strictly, for every
    route.
    """

    async def json(self) -> Any:
        return (await self._decoded())[0]

    async def plain_json(self) -> Any:
        """Return the body as plain values, which still hold fields that the handler's type does not have.

        An empty body (of a GET) is `{}`.
        """
        return (await self._decoded())[1]

    async def _decoded(self) -> tuple[Any, Any]:
        if isinstance(self._json, tuple):
            known: tuple[Any, Any] = self._json
            return known
        body = await self.body()
        if not body:
            return None, {}
        field = self.route_handler.parsed_data_field
        kind = field.annotation if field else Any
        depth: int = self.app.state.json_depth
        if len(body) > _BIG_BODY:  # the loop must turn for everybody else
            decoded = await asyncio.to_thread(strict_json.decode, body, kind, depth)
        else:
            decoded = strict_json.decode(body, kind, depth)
        self._json = decoded
        return decoded


def is_local_socket(connection: ASGIConnection[Any, Any, Any, Any] | Scope) -> bool:
    """Return True if the request came over the unix socket (the server marks it; headers cannot)."""
    scope = connection if isinstance(connection, dict) else connection.scope
    return LOCAL in (scope.get("extensions") or {})


def request_id(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the `x-request-id` of this exchange: the client's if it was well formed, else ours."""
    value: str = connection.scope["state"]["request_id"]
    return value


FORM = "form"
"""Key in the scope's state, set by the shell."""
_MOST_FIELDS = 500


def is_form(connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
    return bool(connection.scope["state"].get(FORM))


async def form_of(connection: ASGIConnection[Any, Any, Any, Any]) -> dict[str, str]:
    """Return a form's fields by name. Raises ApiError 400; a repeated name is an error."""
    assert isinstance(connection, Request)
    try:
        text = (await connection.body()).decode("ascii")
        pairs = parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=bool(text),
            errors="strict",
            max_num_fields=_MOST_FIELDS,
        )
    except ValueError as error:
        raise ApiError(400, "The form cannot be read.", "invalid_form") from error
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ApiError(400, "The form holds a field twice.", "invalid_form")
    return fields
