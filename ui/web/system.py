"""The box itself: checks, versions, files and their sizes, the log, and what may be erased."""

import asyncio
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from litestar import MediaType, Response, get, post

from llmbox.app.daemon.log_tail import LEVELS, tail
from llmbox.app.errors import ApiError
from llmbox.app.http.admin.telemetry import run_doctor
from llmbox.app.http.forms import form_of
from llmbox.app.services import Services

from .forms import done
from .render import Panel, PanelRequest, page, panel_of, render

BACK = "/admin/system"
LINES = 60


@get("/system", name="panel_system")
async def system_page(request: PanelRequest, level: str = "info", checks: int = 0) -> Response[str]:
    panel = panel_of(request)
    level = level if level in LEVELS else "info"
    services = panel.services
    return page(
        request,
        "system.html",
        "system",
        running=panel.control.running,
        uptime=time.time() - panel.control.running.started_at,
        python=platform.python_version(),
        paths=services.paths,
        disk=await asyncio.to_thread(_disk, services),
        settings=services.settings,
        lines=await asyncio.to_thread(tail, services.paths.log_file, LINES, level),
        levels=LEVELS[:4],
        level=level,
        findings=await _findings(panel) if checks else None,
        brief=False,
    )


@get("/system/checks", name="panel_checks")
async def checks_piece(request: PanelRequest, brief: int = 0) -> Response[str]:
    """`brief` leaves out what is well."""
    panel = panel_of(request)
    html = render("live/checks.html", panel, findings=await _findings(panel), brief=bool(brief))
    return Response(html, media_type=MediaType.HTML)


@post("/system/purge", status_code=200, name="panel_purge")
async def purge(request: PanelRequest) -> Response[str]:
    text = (await form_of(request)).get("days", "")
    if not text.isdecimal() or len(text) > 5:
        raise ApiError(400, "Days must be a whole number.", "invalid_value", "days")
    count = await panel_of(request).services.request_log.purge(time.time() - int(text) * 86400)
    return done(request, BACK, f"Erased {count} rows of the request log.")


async def _findings(panel: Panel) -> list[dict[str, str]]:
    return await asyncio.to_thread(run_doctor, panel.services)


def _disk(services: Services) -> dict[str, Any]:
    paths = services.paths
    database = sum(_size(Path(f"{paths.request_db}{end}")) for end in ("", "-wal", "-shm"))
    logs = sum(_size(file) for file in paths.log_file.parent.glob("daemon.log*"))
    usage = shutil.disk_usage(paths.state_dir)
    return {"database": database, "logs": logs, **{f"disk_{k}": v for k, v in usage._asdict().items()}}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
