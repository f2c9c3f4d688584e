"""Everything under /admin that is a page, and the files that pages need."""

from litestar import Router
from litestar.types import ControllerRouterHandler

from llmbox.app.http.guard import Access

from .discover import activity_page, change_download, discover_page, pull
from .first_run import first_run_page
from .forms import show_error
from .keys import add_key, keys_page, revoke_key, rotate_key
from .live import live
from .memory import memory_page
from .model import model_page
from .model_names import add_alias, remove_alias, template_preview
from .model_plan import plan_piece
from .models import load_model, models_page, pin_model, unload_model
from .overview import overview_page
from .playground import playground_page
from .request_export import export_csv, export_json
from .requests import cancel_request, replay_request, request_page, requests_page
from .settings import review_settings, save_settings, settings_page
from .static_files import static_file
from .system import backup, bundle, checks_piece, purge, system_page
from .telemetry import telemetry_page

panel_routes: list[ControllerRouterHandler] = [
    Router(
        "/admin",
        route_handlers=[
            activity_page,
            add_alias,
            add_key,
            backup,
            bundle,
            cancel_request,
            change_download,
            checks_piece,
            discover_page,
            export_csv,
            export_json,
            keys_page,
            first_run_page,
            live,
            load_model,
            memory_page,
            model_page,
            models_page,
            overview_page,
            plan_piece,
            playground_page,
            pin_model,
            pull,
            purge,
            remove_alias,
            replay_request,
            request_page,
            requests_page,
            review_settings,
            revoke_key,
            rotate_key,
            save_settings,
            settings_page,
            system_page,
            telemetry_page,
            template_preview,
            unload_model,
        ],
        opt={"access": Access.PAGE, "form": True},
        exception_handlers={Exception: show_error},
        include_in_schema=False,
    ),
    static_file,
]
