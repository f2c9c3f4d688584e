"""Admin panel: pages rendered on the server, with live fragments over server-sent events."""

from litestar import Router
from litestar.types import ControllerRouterHandler

from llmbox.app.http.auth.guard import Access

from .live import live
from .pages import adapters
from .pages.keys import add_key, change_limits, keys_page, revoke_key, rotate_key
from .pages.model_detail import add_alias, model_page, plan_piece, remove_alias, template_preview
from .pages.models import (
    activity_page,
    change_download,
    chat_page,
    discover_page,
    load_model,
    models_page,
    pin_model,
    playground_page,
    pull,
    refresh_recommended,
    unload_model,
)
from .pages.overview import first_run_page, memory_page, overview_page, telemetry_page, usage_piece
from .pages.requests import (
    cancel_request,
    export_csv,
    export_json,
    replay_request,
    request_page,
    requests_page,
)
from .pages.settings import review_settings, save_settings, settings_page
from .pages.system import backup, bundle, check_update, checks_piece, purge, system_page
from .render import show_error, static_file

panel_routes: list[ControllerRouterHandler] = [
    Router(
        "/admin",
        route_handlers=[
            activity_page,
            adapters.adapters_page,
            adapters.add,
            adapters.cancel,
            adapters.remove,
            add_alias,
            add_key,
            backup,
            bundle,
            cancel_request,
            change_download,
            change_limits,
            chat_page,
            check_update,
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
            refresh_recommended,
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
            usage_piece,
        ],
        opt={"access": Access.PAGE, "form": True},
        exception_handlers={Exception: show_error},
        include_in_schema=False,
    ),
    static_file,
]


__all__ = ["panel_routes"]
