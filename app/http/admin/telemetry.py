"""Telemetry for dashboards and `-f` commands: event feed, history, KV blocks, log lines."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from litestar import get, post
from litestar.params import FromQuery, JSONBody, QueryParameter
from msgspec import Struct

from llmbox.engine.ipc.profile_messages import StepProfile

from ...config.entries import find_price, find_target
from ...control.controller import DaemonController
from ...errors import ApiError
from ...events import Event, Events
from ...log import LEVEL_NAMES, LogEntry, tail
from ...services import Services
from ...store.usage import ModelUsage, Outcomes, outcomes, usage_by_model
from ...telemetry.daemon_profile import DaemonTimes
from ...telemetry.device_memory import KVBlockMap
from ...telemetry.history import KEEP, MOST, Annotation, is_series, resample, step_for
from ...telemetry.snapshot import Tick
from ...util.threads import off_loop
from ..auth.guard import identity_of
from ..server.request import StrictRequest
from ..server.sse import EventStreamResponse, SseOptions
from .schema import Since

OPTIONS = SseOptions(endless=True, last=b"")


@get("/events", sync_to_thread=False)
def events(request: StrictRequest) -> EventStreamResponse:
    """Stream events from now on, or from after the event that `Last-Event-ID` names."""
    services = request.services
    identity = identity_of(request)
    allowed = lambda: services.security.is_valid(identity)  # noqa: E731
    return EventStreamResponse(_frames(services.events, _last_id(request), allowed), OPTIONS)


async def _frames(feed: Events, last: int | None, allowed: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Yield framed events. Ends when the reader signs out or the key is revoked: at the next event, a tick at
    the latest.
    """
    async with aclosing(feed.subscribe(last)) as subscription:
        async for event in subscription:
            if not allowed():
                return
            yield _frame(event)


def _frame(event: Event) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (
        event.id,
        event.type.encode(),
        msgspec.json.encode(event.data),
    )


def _last_id(request: StrictRequest) -> int | None:
    text = request.headers.get("last-event-id")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise ApiError(400, "Last-Event-ID must be a number.", "invalid_header", "Last-Event-ID")
    return int(text)


MOST_LINES = 5000
DEFAULT_REACH = 600.0
DEFAULT_CELLS = 512
MOST_CELLS = 4096
MOST_POINTS = 5000


class TelemetryAnswer(Struct):
    """Time series. `series` columns run beside `times` (Unix seconds); null where a series has no value."""

    step: int
    times: list[int]
    series: dict[str, list[float | None]]


class AnnotationsAnswer(Struct):
    marks: list[Annotation]
    """Newest first."""


class UsageAnswer(Struct):
    currency: str
    usage: list[ModelUsage]
    """Most requests first."""


class BlockMaps(Struct):
    models: list[KVBlockMap]


class LogLines(Struct):
    lines: list[LogEntry]


@get("/tick")
async def newest_tick(request: StrictRequest) -> Tick:
    return await request.services.telemetry.newest()


@get("/telemetry")
async def history(
    request: StrictRequest,
    series: FromQuery[str | None] = None,
    since: Since = None,
    step: FromQuery[int | None] = None,
    points: Annotated[int | None, QueryParameter(ge=1, le=MOST_POINTS)] = None,
) -> TelemetryAnswer:
    """Return time series. `series`: names, comma separated; `since`: Unix seconds (default: ten minutes ago);
    `points`: maximum number of points, at equal intervals, without the interval that has just begun.
    """
    begin = _begin(since)
    if step is not None and step not in KEEP:
        steps = ", ".join(map(str, KEEP))
        raise ApiError(400, f"step must be one of {steps} (seconds).", "invalid_value", "step")
    names = None if series is None else [name.strip() for name in series.split(",") if name.strip()]
    for name in names or ():
        if not is_series(name):
            raise ApiError(400, f"No series {name!r} exists.", "invalid_value", "series")
    history = request.services.telemetry.history
    chart = await history.chart(step or step_for(time.time() - begin), int(begin), names)
    if points is not None:
        size = len(chart.times) * len(chart.series)
        fine, now = chart, int(time.time())
        chart = await off_loop(size, lambda: resample(fine, int(begin), now, points))
    return TelemetryAnswer(**asdict(chart))


async def usage_of(services: Services, since: float) -> list[ModelUsage]:
    """Usage since a Unix time, with the prices and targets that are set now."""
    rules = services.settings.usage
    return await usage_by_model(
        services.request_log,
        since,
        lambda model: find_price(rules.prices, model),
        lambda model: find_target(rules.targets, model),
    )


def _begin(since: float | None) -> float:
    return time.time() - DEFAULT_REACH if since is None else since


@get("/marks")
async def marks(
    request: StrictRequest,
    since: Since = None,
    limit: Annotated[int, QueryParameter(ge=1, le=MOST)] = MOST,
) -> AnnotationsAnswer:
    """Return annotations of the history: loads, evictions, refusals, restarts. `since`: as for the
    history.
    """
    return AnnotationsAnswer(await request.services.telemetry.marks.since(_begin(since), limit))


@get("/outcomes")
async def request_outcomes(
    request: StrictRequest,
    since: Since = None,
    points: Annotated[int, QueryParameter(ge=1, le=MOST_POINTS)] = 60,
) -> Outcomes:
    """Count requests by outcome, in at most `points` intervals. `since`: as for the history."""
    begin, now = int(_begin(since)), int(time.time())
    step = max(1, math.ceil((now - begin) / points))
    return await outcomes(request.services.request_log, begin, now, step)


@get("/usage")
async def usage(request: StrictRequest, since: Since = None) -> UsageAnswer:
    """Return usage, cost and goodput by key and model. `since`: as for the history."""
    services = request.services
    rules = services.settings.usage
    return UsageAnswer(rules.currency, await usage_of(services, _begin(since)))


@get("/blocks")
async def blocks(
    request: StrictRequest,
    cells: Annotated[int, QueryParameter(ge=1, le=MOST_CELLS)] = DEFAULT_CELLS,
) -> BlockMaps:
    """Return each model's KV blocks in at most `cells` cells. Each call queries the engines: do not poll it
    often.
    """
    return BlockMaps(await request.services.telemetry.blocks.read(cells))


@get("/logs")
async def log_lines(
    request: StrictRequest,
    lines: Annotated[int, QueryParameter(ge=1, le=MOST_LINES)] = 200,
    level: FromQuery[str] = "debug",
    component: FromQuery[str | None] = None,
) -> LogLines:
    """Return the newest lines of the daemon's log, oldest first."""
    if level not in LEVEL_NAMES:
        raise ApiError(400, f"level must be one of {', '.join(LEVEL_NAMES)}.", "invalid_value", "level")
    found = await asyncio.to_thread(tail, request.services.paths.log_file, lines, level, component)
    return LogLines(found)


class ProfileRequest(Struct, forbid_unknown_fields=True):
    model: str
    is_on: bool


class ProfileAnswer(Struct):
    engine: StepProfile
    daemon: DaemonTimes | None = None
    """Set at the end."""


@post("/profile", status_code=200)
async def profile(request: StrictRequest, data: JSONBody[ProfileRequest]) -> ProfileAnswer:
    """Start or stop the profile of a model's steps. It stops by itself after ten minutes."""
    services = request.services
    model = services.engines.get(data.model)
    daemon = services.telemetry.profiler.stop() if not data.is_on else None
    found = await model.supervisor.profile_steps(is_on=data.is_on)
    if found is None:
        message = f"The engine of {model.supervisor.name} is not ready, or did not answer."
        raise ApiError(503, message, "engine_unavailable", "model", type="server_error")
    if data.is_on:
        services.telemetry.profiler.start()
    return ProfileAnswer(found, daemon)


class Findings(Struct):
    ok: bool
    findings: list[dict[str, str]]


@get("/doctor")
async def doctor(request: StrictRequest) -> Findings:
    """Run the checks of `llmbox doctor` in the daemon, which takes a second or two."""
    control: DaemonController = request.app.state.control
    found = await asyncio.to_thread(control.checks)
    return Findings(not any(each["status"] == "failed" for each in found), found)


@get("/bench")
async def bench_runs(request: StrictRequest) -> dict[str, list[dict[str, Any]]]:
    """Return saved results of `llmbox bench`, newest first."""
    return {"runs": await asyncio.to_thread(_runs, request.services)}


def _runs(services: Services) -> list[dict[str, Any]]:
    from ...bench.measure import bench_folder, read_runs  # noqa: PLC0415

    return [msgspec.to_builtins(run) for run in read_runs(bench_folder(services.paths))]
