"""Bodies of HTML forms, only on routes with `opt={"form": True}`: everywhere else JSON alone is taken."""

from typing import Any
from urllib.parse import parse_qsl

from litestar import Request
from litestar.connection import ASGIConnection

from ..errors import ApiError

FORM = "form"
"""Key in the scope's state, set by the shell."""
_MOST_FIELDS = 500


def is_form(connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
    return bool(connection.scope["state"].get(FORM))


async def form_of(connection: ASGIConnection[Any, Any, Any, Any]) -> dict[str, str]:
    """Fields by name. Raises ApiError 400; a name that comes twice is an error."""
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
