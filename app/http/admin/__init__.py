"""Routes under /admin/api: what the command line (and later the dashboards) see and do."""

from litestar import Router

from ..guard import Access
from .events import events
from .models import load_model, models, unload_model
from .requests import cancel_request, request_detail, requests
from .status import config, stats, status

admin_router = Router(
    "/admin/api",
    route_handlers=[
        cancel_request,
        config,
        events,
        load_model,
        models,
        request_detail,
        requests,
        stats,
        status,
        unload_model,
    ],
    opt={"access": Access.ADMIN},
    include_in_schema=False,
)

__all__ = ["admin_router"]
