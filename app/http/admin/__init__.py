"""Routes under /admin/api: status and control of the daemon for the command line and the dashboards."""

from litestar import Router

from ..auth.guard import Access
from .chat import (
    call_tool,
    change_server,
    delete_preset,
    delete_server,
    presets,
    save_preset,
    save_server,
    server_tools,
    servers,
)
from .conversations import conversation, conversations, delete_conversation, save_conversation
from .keys import add_key, change_key, keys, revoke_key, rotate_key, sign_in_link
from .library import (
    cancel_download,
    delete_models,
    disk,
    dismiss_download,
    downloads,
    fit,
    pause,
    pull,
    recommended,
    resume,
    search,
)
from .models import config, load_model, models, pin_model, stats, status, unload_model
from .requests import (
    cancel_request,
    forget_stored,
    purge_requests,
    replay_request,
    request_detail,
    requests,
    stored,
)
from .schema import require_known_parameters
from .telemetry import (
    bench_runs,
    blocks,
    doctor,
    events,
    history,
    log_lines,
    marks,
    newest_tick,
    request_outcomes,
    usage,
)

admin_router = Router(
    "/admin/api",
    route_handlers=[
        add_key,
        change_key,
        keys,
        revoke_key,
        rotate_key,
        sign_in_link,
        bench_runs,
        blocks,
        call_tool,
        change_server,
        delete_preset,
        delete_server,
        presets,
        save_preset,
        save_server,
        server_tools,
        servers,
        conversation,
        conversations,
        delete_conversation,
        save_conversation,
        cancel_download,
        dismiss_download,
        cancel_request,
        config,
        disk,
        doctor,
        delete_models,
        downloads,
        events,
        fit,
        history,
        load_model,
        log_lines,
        marks,
        models,
        pause,
        pin_model,
        pull,
        purge_requests,
        newest_tick,
        recommended,
        replay_request,
        request_detail,
        request_outcomes,
        requests,
        resume,
        search,
        stats,
        status,
        stored,
        forget_stored,
        unload_model,
        usage,
    ],
    guards=[require_known_parameters],
    opt={"access": Access.ADMIN},
    include_in_schema=False,
)

__all__ = ["admin_router"]
