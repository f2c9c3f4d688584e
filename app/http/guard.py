"""The one guard, at the root: a route that does not say who may use it is closed."""

from enum import Enum
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from ..errors import ApiError
from .drain import Drain, shutting_down
from .errors import error_type
from .request import is_local_socket


class Access(Enum):
    """Set on each handler (or its router): `opt={"access": Access.INFER}`."""

    LIVENESS = "liveness"
    """Says that we are here, and nothing else."""
    READ = "read"
    """State without content: models, metrics, documents."""
    INFER = "infer"
    """Work for an engine; refused while draining."""
    ADMIN = "admin"
    """Changes the daemon or shows requests: unix socket only."""


def default_deny(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    if connection.scope.get("method") == "OPTIONS":  # Litestar's own handler: names the methods
        return
    match handler.opt.get("access"):
        case Access.LIVENESS | Access.READ:
            return
        case Access.INFER:
            drain: Drain = connection.scope["state"]["drain"]
            if drain.draining:
                raise shutting_down()
        case Access.ADMIN if is_local_socket(connection):
            return
        case Access.ADMIN:
            raise _denied("This route is only served over llmbox's unix socket.")
        case _:
            raise _denied("This route is closed.")


def _denied(message: str) -> ApiError:
    return ApiError(403, message, "permission_denied", None, error_type(403))
