"""Query parameters of the admin API: shared bounds, and the refusal of unknown names."""

from typing import Annotated, Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import QueryParameter

from ...errors import ApiError

_LATEST = 1e11
Since = Annotated[float | None, QueryParameter(ge=0, le=_LATEST, description="Unix seconds.")]
Before = Annotated[int | None, QueryParameter(ge=0, le=2**63 - 1, description="A `seq`, for the next page.")]
Status = Annotated[int | None, QueryParameter(ge=100, le=599)]


def require_known_parameters(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Route guard. Raises ApiError 400: a misspelled filter must not answer with everything."""
    known = handler.parsed_fn_signature.parameters
    for name in connection.query_params:
        if name not in known or name in {"request", "data"}:
            shown = name[:64]
            others = ", ".join(sorted(set(known) - {"request", "data"} - set(connection.path_params)))
            takes = f"It takes {others}." if others else "It takes none."
            raise ApiError(
                400, f"This route has no query parameter {shown!r}. {takes}", "unknown_parameter", shown
            )
