"""Everything under /admin that is a page, and the files that pages need."""

from litestar import Router
from litestar.types import ControllerRouterHandler

from llmbox.app.errors import ApiError
from llmbox.app.http.guard import Access

from .forms import show_error
from .keys import add_key, keys_page, revoke_key, rotate_key
from .live import live
from .models import load_model, models_page, unload_model
from .overview import overview_page
from .playground import playground_page
from .request_export import export_csv, export_json
from .requests import cancel_request, request_page, requests_page
from .static_files import static_file
from .telemetry import telemetry_page

panel_routes: list[ControllerRouterHandler] = [
    Router(
        "/admin",
        route_handlers=[
            add_key,
            cancel_request,
            export_csv,
            export_json,
            keys_page,
            live,
            load_model,
            models_page,
            overview_page,
            playground_page,
            request_page,
            requests_page,
            revoke_key,
            rotate_key,
            telemetry_page,
            unload_model,
        ],
        opt={"access": Access.PAGE, "form": True},
        exception_handlers={ApiError: show_error},
        include_in_schema=False,
    ),
    static_file,
]
