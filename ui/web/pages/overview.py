"""Overview, telemetry and memory pages: alerts, load, charts, usage by model and by key, machine, memory.

Until there is a model, the overview is the first-run page: what is on this machine, what fits, a first
question, and how to connect a client.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from litestar import MediaType, Response, get
from litestar.params import FromQuery

from llmbox.app.config.entries import find_target
from llmbox.app.fit.recommendations import first_choices
from llmbox.app.http.admin.models import describe_all
from llmbox.app.http.admin.schema import ModelStatus
from llmbox.app.http.admin.telemetry import usage_of
from llmbox.app.http.server.sockets import is_loopback
from llmbox.app.integrations.guides import GUIDES
from llmbox.app.models.catalog import DiskModel, on_disk
from llmbox.app.store.usage import ModelUsage
from llmbox.app.telemetry.device_memory import KINDS, DeviceMemory, KVBlockMap, devices_of
from llmbox.app.telemetry.history import TREND_S
from llmbox.app.telemetry.snapshot import NA, GpuReading
from llmbox.engine.errors import EngineError
from llmbox.engine.hardware.machine import Machine, read_machine
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryPlan

from ..render import PageContext, PanelRequest, page, panel_of, render
from .models import downloads_of

RANGES = (
    ("600", "10 min"),
    ("3600", "1 h"),
    ("21600", "6 h"),
    ("86400", "24 h"),
    ("604800", "7 d"),
    ("2592000", "30 d"),
)
MOST_MARKS = 50


@dataclass(frozen=True, slots=True)
class ChartView:
    """Plot of time series. `series` holds names of the history with labels; `unit` is the format of
    values.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    note: str = "No requests in this period."
    """Text where there are no values."""
    lines: tuple[tuple[float, str], ...] = ()
    """Horizontal lines at a value, with labels."""


OUTCOMES = ChartView(
    "Requests by outcome",
    "count",
    (("answered", "answered"), ("refused", "refused"), ("caller", "callers' errors"), ("failed", "failed")),
    "No requests in this period. Each one that ends is counted here.",
)
"""Its series are those of `/admin/api/outcomes`, drawn as stacked bars."""
TOKENS = ChartView("Tokens per second", "rate", (("tokens_out", "output"), ("tokens_in", "input")))
TTFT = ChartView("Time to first token", "seconds", (("ttft_p50", "p50"), ("ttft_p95", "p95")))
TPOT = ChartView("Time per output token", "seconds", (("tpot_p50", "p50"), ("tpot_p95", "p95")))
LOAD = ChartView("Load", "count", (("running", "running"), ("waiting", "waiting")))
CACHES = ChartView(
    "KV cache and prefix cache", "share", (("kv_used", "KV in use"), ("prefix_hit", "prefix hits"))
)
PLOTS = (
    OUTCOMES,
    TOKENS,
    TTFT,
    TPOT,
    LOAD,
    CACHES,
    ChartView("Failed requests, over five minutes", "share", (("error_rate", "failed"),)),
    ChartView("Processor", "share", (("cpu", "CPU"),), "The daemon was not running in this period."),
    ChartView("Memory available", "bytes", (("memory_available", "memory"),), "The daemon was not running."),
    ChartView("Disk free", "bytes", (("disk_free", "disk"),), "The daemon was not running in this period."),
)
GPU_PLOTS = (
    ("utilisation", "share", "utilisation"),
    ("memory used by llmbox", "bytes", "memory_ours"),
    ("memory used by others", "bytes", "memory_others"),
    ("temperature", "degrees", "temperature"),
    ("power", "watts", "power"),
    ("clock", "megahertz", "clock_sm"),
    ("PCIe in, per second", "bytes", "pcie_in"),
    ("PCIe out, per second", "bytes", "pcie_out"),
    ("NVLink in, per second", "bytes", "nvlink_in"),
    ("NVLink out, per second", "bytes", "nvlink_out"),
)
"""(title, unit, series) of plots with one line for each GPU."""


TRENDS: Final = {
    "tokens_out": 1.0,
    "ttft_p95": 0.001,
    "tpot_p95": 0.001,
    "open_requests": 1.0,
    "error_rate": 0.1,
    "kv_used": 1.0,
}
"""Series of the small charts, and the least value of their upper edges."""
TREND_HEIGHT: Final = 28


@get("/", name="panel_overview")
async def overview_page(request: PanelRequest, range: FromQuery[str] = "86400") -> Response[str]:  # noqa: A002 - as in the URL
    panel = panel_of(request)
    chosen = _range(range, "86400")
    return page(
        request,
        "overview/overview.html",
        "overview",
        url=panel.control.running.url,
        plots=_with_targets(panel, (OUTCOMES, TOKENS, TTFT, TPOT, LOAD, CACHES)),
        ranges=RANGES,
        chosen=chosen,
        **await _now(panel),
        **await _usage(panel, chosen),
    )


async def overview_pieces(panel: PageContext) -> dict[str, str]:
    values = await _now(panel)
    templates = {name: f"live/{name}.html" for name in ("attention", "now", "boxes")}
    templates["loaded"] = "live/models/loaded.html"
    return {name: render(template, panel, **values) for name, template in templates.items()}


@get("/usage", name="panel_usage")
async def usage_piece(request: PanelRequest, range: FromQuery[str] = "86400") -> Response[str]:  # noqa: A002 - as in the URL
    """Usage by model and by key: refreshed four times a minute, as it reads the request log."""
    panel = panel_of(request)
    html = render("overview/usage.html", panel, **await _usage(panel, _range(range, "86400")))
    return Response(html, media_type=MediaType.HTML)


async def _now(panel: PageContext) -> dict[str, Any]:
    tick = await panel.services.telemetry.newest()
    rates = {each.model: each for each in tick.error_rates}
    points = panel.services.telemetry.history.trend
    return {
        "tick": tick,
        "models": describe_all(panel.control),
        "rates": rates,
        "trends": {name: _trend(points, name, top, int(tick.time)) for name, top in TRENDS.items()},
    }


def _trend(points: Iterable[tuple[int, dict[str, float]]], name: str, top: float, now: int) -> str:
    """Return a series as an SVG path: its last ten minutes, or since its first value if that is later.

    Its ends lie outside the picture. `top` is the least value of the upper edge. Empty if all
    values are 0 or there are fewer than two.
    """
    found = [(at, values[name]) for at, values in points if at >= now - TREND_S and name in values]
    if len(found) < 2 or not any(value for _, value in found):
        return ""
    begin, span = found[0][0], found[-1][0] - found[0][0]
    high = max(top, *(value for _, value in found))
    line = "".join(
        f"L{TREND_S * (at - begin) // span} {TREND_HEIGHT * (1 - 0.9 * value / high):.0f}"
        for at, value in found
    )
    return f"M-9 {TREND_HEIGHT + 9}{line}h9V{TREND_HEIGHT + 9}"


async def _usage(panel: PageContext, chosen: str) -> dict[str, Any]:
    rows = await usage_of(panel.services, time.time() - int(chosen))
    rules = panel.services.settings.usage
    return {
        "by_model": _sum(rows, "model"),
        "by_key": _sum(rows, "key"),
        "currency": rules.currency,
        "priced": bool(rules.prices),
        "targeted": bool(rules.targets),
        "since": chosen,
        "range_label": dict(RANGES)[chosen],
    }


def _sum(rows: list[ModelUsage], by: str) -> list[dict[str, Any]]:
    """Sum the rows by `model` or `key`, most requests first. `aimed` counts answers with a target."""
    totals: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = getattr(row, by)
        total = totals.setdefault(name, {"name": name, "cost": None, "good": None, "aimed": 0})
        for field in ("requests", "failed", "refused", "tokens_in", "tokens_cached", "tokens_out"):
            total[field] = total.get(field, 0) + getattr(row, field)
        if row.cost is not None:
            total["cost"] = (total["cost"] or 0.0) + row.cost
        if row.good is not None:
            total["good"] = (total["good"] or 0) + row.good
            total["aimed"] += row.measured
    return sorted(totals.values(), key=lambda each: -each["requests"])


def _with_targets(panel: PageContext, plots: tuple[ChartView, ...]) -> Iterator[ChartView]:
    """Draw the latency targets of the loaded models as lines in the charts of latencies."""
    names = [model.name for model in describe_all(panel.control)]
    rules = panel.services.settings.usage.targets
    targets = {name: found for name in names if (found := find_target(rules, name))}
    for plot in plots:
        field = {"Time to first token": "ttft", "Time per output token": "tpot"}.get(plot.title)
        lines = {getattr(each, field): name for name, each in targets.items()} if field else {}
        yield replace(plot, lines=tuple((value, f"target of {name}") for value, name in lines.items()))


def _range(text: str, default: str) -> str:
    return text if text in dict(RANGES) else default


@get("/telemetry", name="panel_telemetry")
async def telemetry_page(request: PanelRequest, range: FromQuery[str] = "600") -> Response[str]:  # noqa: A002 - as in the URL
    panel = panel_of(request)
    tick = await panel.services.telemetry.newest()
    chosen = _range(range, "600")
    marks = await panel.services.telemetry.marks.since(tick.time - int(chosen))
    return page(
        request,
        "overview/telemetry.html",
        "telemetry",
        plots=[*_with_targets(panel, PLOTS), *_gpu_plots(tick.gpus.devices)],
        ranges=RANGES,
        chosen=chosen,
        tick=tick,
        marks=marks[:MOST_MARKS],
    )


def _gpu_plots(gpus: tuple[GpuReading, ...]) -> Iterator[ChartView]:
    for title, unit, name in GPU_PLOTS if gpus else ():
        lines = tuple((f"gpu{gpu.index}.{name}", f"GPU {gpu.index}") for gpu in gpus)
        known = any(getattr(gpu, name) is not NA for gpu in gpus)
        problem = next((f"GPU {gpu.index}: {gpu.problem}." for gpu in gpus if gpu.problem), "")
        note = "No readings in this period." if known else problem or f"{gpus[0].name} does not report it."
        yield ChartView(f"GPU {title}", unit, lines, note)


COLUMNS: Final = 96
MOST_CELLS: Final = COLUMNS * 16
CELL: Final = 10
"""Side of a square in the map's units."""
LABELS: Final = dict(zip(KINDS, ("weights", "KV in use", "KV cached", "KV free", "workspace"), strict=True))
DAY: Final = 86400
MOST_MEMORY_MARKS: Final = 12
MOST_PREFIXES: Final = 10


@dataclass(frozen=True, slots=True)
class Bar:
    device: DeviceMemory
    parts: list[tuple[str, float, float]]
    """(kind, start, share) of each part of the device's memory."""


@dataclass(frozen=True, slots=True)
class BlockMapPicture:
    blocks: KVBlockMap
    paths: dict[str, str]
    """Squares of each state as one SVG path."""
    width: int
    height: int
    cells: str
    """Blocks for the page's script: `count,live,cached,owner,holders` for each run of squares."""


@get("/memory", name="panel_memory")
async def memory_page(request: PanelRequest) -> Response[str]:
    values = await _values(panel_of(request))
    return page(request, "memory.html", "memory", **values)


async def memory_pieces(panel: PageContext) -> dict[str, str]:
    values = await _values(panel)
    return {name: render(f"live/{name}.html", panel, **values) for name in ("devices", "maps", "marks")}


async def _values(panel: PageContext) -> dict[str, Any]:
    telemetry = panel.services.telemetry
    tick = await telemetry.newest()
    return {
        "tick": tick,
        "bars": [_bar(device) for device in devices_of(tick)],
        "labels": LABELS,
        "maps": [_map(blocks) for blocks in await telemetry.blocks.read(MOST_CELLS)],
        "most_prefixes": MOST_PREFIXES,
        "engines": {engine.model: engine for engine in tick.engines},
        "marks": await telemetry.marks.since(tick.time - DAY, MOST_MEMORY_MARKS),
    }


def _bar(device: DeviceMemory) -> Bar:
    parts, start = [], 0.0
    for part in device.parts if device.total else ():
        share = part.size / device.total
        parts.append((part.kind, start, share))
        start += share
    return Bar(device, parts)


def _map(blocks: KVBlockMap) -> BlockMapPicture:
    paths = {"live": "", "cached": "", "free": ""}
    at = 0
    for run in blocks.cells:
        paths[run.state] += _strips(at, run.count)
        at += run.count
    cells = ";".join(f"{run.count},{run.live},{run.cached},{run.owner},{run.holders}" for run in blocks.cells)
    width = min(at, COLUMNS) * CELL
    return BlockMapPicture(blocks, paths, width, -(-at // COLUMNS) * CELL, cells)


def _strips(first: int, count: int) -> str:
    """Return the path of neighboring squares, row by row."""
    path, last = "", first + count
    while first < last:
        row, column = divmod(first, COLUMNS)
        end = min(last, (row + 1) * COLUMNS)
        path += f"M{column * CELL} {row * CELL}h{(end - first) * CELL}v{CELL}h-{(end - first) * CELL}z"
        first = end
    return path


@dataclass(frozen=True, slots=True)
class ModelChoice:
    disk: DiskModel
    plan: MemoryPlan | None
    reason: str
    state: str
    """State of the model in memory; empty if it is not loaded."""


@get("/first-run", name="panel_first_run")
async def first_run_page(request: PanelRequest) -> Response[str]:
    panel = panel_of(request)
    machine, candidates = await asyncio.to_thread(_look, panel)
    choices = first_choices(await panel.control.library.recommend())
    loaded = describe_all(panel.control)
    server = panel.services.settings.server
    return page(
        request,
        "first_run.html",
        "overview",
        machine=machine,
        candidates=candidates,
        choices=choices,
        models=loaded,
        downloads=downloads_of(panel),
        names=_names(loaded, candidates),
        needs_key=server.require_key or not is_loopback(panel.control.running.host),
        guides=GUIDES,
        url=panel.control.running.url,
    )


async def first_run_pieces(panel: PageContext) -> dict[str, str]:
    downloads = downloads_of(panel)
    return {
        "loaded": render("live/models/loaded.html", panel, models=describe_all(panel.control)),
        "downloads": render("live/models/downloads.html", panel, downloads=downloads) if downloads else "",
    }


def _names(loaded: list[ModelStatus], candidates: list[ModelChoice]) -> list[str]:
    """Return the models that can be requested, ready ones first: a request loads a model from disk."""
    ready = [each.name for each in loaded if each.state == "ready"]
    return list(dict.fromkeys([*ready, *(each.disk.ref.name for each in candidates if each.plan)]))


def _look(panel: PageContext) -> tuple[Machine, list[ModelChoice]]:
    states = {model.ref: model.state for model in describe_all(panel.control)}
    models = on_disk(os.environ, panel.control.library.registry.read())
    return read_machine(), [_candidate(panel, each, states) for each in models if each.servable]


def _candidate(panel: PageContext, disk: DiskModel, states: dict[str, str]) -> ModelChoice:
    state = states.get(disk.ref.ref, "")
    try:
        plan, reason = panel.control.library.planner.plan(parse_config(disk.ref.path))
    except EngineError as error:
        return ModelChoice(disk, None, str(error), state)
    return ModelChoice(disk, plan, reason, state)
