"""What dashboards read besides the event feed: the newest tick, history, the log, findings."""

import asyncio
import math
import time
from dataclasses import asdict
from typing import Any

import msgspec
from litestar import Request, get
from litestar.datastructures import State
from msgspec import Struct

from ...daemon.log_tail import LEVELS, LogEntry, tail
from ...errors import ApiError
from ...services import Services
from ...telemetry.history import KEEP, is_series, step_for
from ...telemetry.snapshot import Tick

MOST_LINES = 5000
DEFAULT_REACH = 600.0


class Telemetry(Struct):
    """`series` columns run beside `times` (Unix seconds); null where a series has no value."""

    step: int
    times: list[int]
    series: dict[str, list[float | None]]


class LogLines(Struct):
    lines: list[LogEntry]


@get("/tick", name="admin_tick")
async def newest_tick(request: Request[Any, Any, State]) -> Tick:
    services: Services = request.app.state.services
    return await services.telemetry.newest()


@get("/telemetry", name="admin_telemetry")
async def history(
    request: Request[Any, Any, State],
    series: str | None = None,
    since: float | None = None,
    step: int | None = None,
) -> Telemetry:
    """`series`: names, comma separated; `since`: Unix seconds (default: ten minutes ago)."""
    services: Services = request.app.state.services
    now = time.time()
    begin = now - DEFAULT_REACH if since is None else since
    if not math.isfinite(begin) or begin < 0:
        raise ApiError(400, "since must be Unix seconds.", "invalid_value", "since")
    if step is not None and step not in KEEP:
        steps = ", ".join(map(str, KEEP))
        raise ApiError(400, f"step must be one of {steps} (seconds).", "invalid_value", "step")
    names = None if series is None else [name.strip() for name in series.split(",") if name.strip()]
    for name in names or ():
        if not is_series(name):
            raise ApiError(400, f"There is no series {name!r}.", "invalid_value", "series")
    chart = await services.telemetry.history.chart(step or step_for(now - begin), int(begin), names)
    return Telemetry(**asdict(chart))


@get("/logs", name="admin_logs")
async def log_lines(
    request: Request[Any, Any, State],
    lines: int = 200,
    level: str = "debug",
    component: str | None = None,
) -> LogLines:
    """The newest lines of the daemon's log, oldest first."""
    services: Services = request.app.state.services
    if level not in LEVELS:
        raise ApiError(400, f"level must be one of {', '.join(LEVELS)}.", "invalid_value", "level")
    count = max(1, min(lines, MOST_LINES))
    found = await asyncio.to_thread(tail, services.paths.log_file, count, level, component)
    return LogLines(found)


class Findings(Struct):
    ok: bool
    findings: list[dict[str, str]]


@get("/doctor", name="admin_doctor")
async def doctor(request: Request[Any, Any, State]) -> Findings:
    """The checks of `llmbox doctor`, run by the daemon: takes a second or two."""
    services: Services = request.app.state.services
    found = await asyncio.to_thread(run_doctor, services)
    return Findings(not any(each["status"] == "failed" for each in found), found)


def run_doctor(services: Services) -> list[dict[str, str]]:
    from ...cli.checks import run_checks  # noqa: PLC0415 - imports what only the checks need
    from ...cli.program import Program  # noqa: PLC0415

    program = Program()
    program.paths = services.paths
    return [asdict(finding) for finding in run_checks(program)]


@get("/bench", name="admin_bench")
async def bench_runs(request: Request[Any, Any, State]) -> dict[str, list[dict[str, Any]]]:
    """Kept results of `llmbox bench`, newest first."""
    services: Services = request.app.state.services
    return {"runs": await asyncio.to_thread(_runs, services)}


def _runs(services: Services) -> list[dict[str, Any]]:
    from ...bench.runs import bench_folder, read_runs  # noqa: PLC0415

    return [msgspec.to_builtins(run) for run in read_runs(bench_folder(services.paths))]
