"""System page: checks, versions, files and their sizes, the log, backups and erasure."""

import asyncio
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from litestar import MediaType, Response, get, post
from litestar.params import FromQuery
from litestar.response import Stream

from llmbox.app.config.paths import Paths
from llmbox.app.diagnostics.bundle import write_bundle
from llmbox.app.diagnostics.checks import run_checks
from llmbox.app.diagnostics.systemd import read_status
from llmbox.app.diagnostics.updates import check_for_update
from llmbox.app.errors import ApiError, CliError
from llmbox.app.http.auth.guard import identity_of
from llmbox.app.http.server.request import form_of
from llmbox.app.lifecycle.program import Program
from llmbox.app.log import LEVEL_NAMES, tail
from llmbox.app.services import Services
from llmbox.app.store.database_file import back_up

from ..render import PageContext, PanelRequest, done, is_fragment, page, panel_of, render

BACK = "/admin/system"
LINES = 60
PIECE = 1 << 18


@get("/system", name="panel_system")
async def system_page(
    request: PanelRequest, level: FromQuery[str] = "info", checks: FromQuery[int] = 0
) -> Response[str]:
    return await _system(request, level, checks=bool(checks))


async def _system(
    request: PanelRequest, level: str = "info", *, checks: bool = False, **values: Any
) -> Response[str]:
    panel = panel_of(request)
    level = level if level in LEVEL_NAMES else "info"
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
        service=await asyncio.to_thread(_service, services),
        settings=services.settings,
        lines=await asyncio.to_thread(tail, services.paths.log_file, LINES, level),
        levels=LEVEL_NAMES[:4],
        level=level,
        findings=await _findings(panel) if checks else None,
        brief=False,
        **{"update": None, "problem": None, **values},
    )


@post("/system/update", status_code=200, name="panel_update")
async def check_update(request: PanelRequest) -> Response[str]:
    """Ask the package index for a newer version, for this one time."""
    values: dict[str, Any] = {"update": None, "problem": None}
    try:
        values["update"] = await asyncio.to_thread(check_for_update, os.environ)
    except CliError as error:
        values["problem"] = error
    if not is_fragment(request):
        return await _system(request, **values)
    html = render("live/update.html", panel_of(request), **values)
    return Response(html, media_type=MediaType.HTML)


@get("/system/checks", name="panel_checks")
async def checks_piece(request: PanelRequest, brief: FromQuery[int] = 0) -> Response[str]:
    """Run the checks. `brief` leaves out those that passed."""
    panel = panel_of(request)
    html = render("live/checks.html", panel, findings=await _findings(panel), brief=bool(brief))
    return Response(html, media_type=MediaType.HTML)


@post("/system/purge", status_code=200, name="panel_purge")
async def purge(request: PanelRequest) -> Response[str]:
    text = (await form_of(request)).get("days", "")
    if not text.isdecimal() or len(text) > 5:
        raise ApiError(400, "Days must be a whole number.", "invalid_value", "days")
    count = await panel_of(request).services.request_log.purge(time.time() - int(text) * 86400)
    return done(request, BACK, f"Erased {count} rows, kept contents and stored answers.")


@post("/system/backup", status_code=200, name="panel_backup")
async def backup(request: PanelRequest) -> Stream:
    """Download a copy of the database: request log and telemetry as they are now."""
    services = panel_of(request).services
    if not services.security.is_owner(identity_of(request)):
        raise ApiError(
            403,
            "A backup holds prompts and answers of other keys. Sign in by the link that llmbox up prints, or "
            "use llmbox db backup on the box.",
            "insufficient_scope",
            type="permission_error",
        )
    paths = services.paths
    return await _download(paths, "llmbox-backup", "db", lambda copy: back_up(paths.request_db, copy))


@post("/system/bundle", status_code=200, name="panel_bundle")
async def bundle(request: PanelRequest) -> Stream:
    """Download the support bundle, without secrets, prompts and answers."""
    services = panel_of(request).services

    def make(file: Path) -> None:
        program = _program_of(services)
        write_bundle(program, run_checks(program), file)

    return await _download(services.paths, "llmbox-bundle", "zip", make)


async def _download(paths: Paths, name: str, ending: str, make: Callable[[Path], object]) -> Stream:
    """Send a temporary file that `make` writes. It is unlinked before it is sent."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.{ending}"
    file = paths.state_dir / f".{secrets.token_hex(8)}-{name}"
    try:
        await asyncio.to_thread(make, file)
    except CliError as error:
        why = error.why.replace(str(file), "the copy")
        raise ApiError(500, f"It cannot be created: {why}.", "storage_failed", type="server_error") from error
    handle = file.open("rb")
    file.unlink()
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Stream(_pieces(handle), media_type="application/octet-stream", headers=headers)


def _pieces(handle: BinaryIO) -> Iterator[bytes]:
    with handle:
        while piece := handle.read(PIECE):
            yield piece


def _program_of(services: Services) -> Program:
    """Create the CLI context, for functions shared with the command line."""
    program = Program()
    program.paths = services.paths
    return program


def _service(services: Services) -> dict[str, Any]:
    """Return the status of the system service if it is installed, otherwise of the user's."""
    program = _program_of(services)
    system = read_status(program, system=True)
    return system if system["installed"] else read_status(program, system=os.geteuid() == 0)


async def _findings(panel: PageContext) -> list[dict[str, str]]:
    return await asyncio.to_thread(panel.control.checks)


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
