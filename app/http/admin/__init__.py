"""Routes under /admin/api: status and control of the daemon for the command line and the dashboards."""

from litestar import Router

from ..auth.guard import Access
from ..server.request import handlers_of
from . import chat, keys, library, models, requests, telemetry
from .schema import require_known_parameters

admin_router = Router(
    "/admin/api",
    route_handlers=handlers_of(chat, keys, library, models, requests, telemetry),
    guards=[require_known_parameters],
    opt={"access": Access.ADMIN},
    include_in_schema=False,
)

__all__ = ["admin_router"]
