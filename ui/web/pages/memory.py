"""Memory page: use by device, model and KV block."""

from dataclasses import dataclass
from typing import Any, Final

from litestar import Response, get

from llmbox.app.telemetry.device_memory import KINDS, Blocks, DeviceMemory, devices_of

from ..render import Panel, PanelRequest, page, panel_of, render

COLUMNS: Final = 96
MOST_CELLS: Final = COLUMNS * 16
CELL: Final = 10
"""Side of a square in the map's units."""
LABELS: Final = dict(zip(KINDS, ("weights", "KV in use", "KV cached", "KV free", "workspace"), strict=True))
DAY: Final = 86400
MOST_MARKS: Final = 12
MOST_PREFIXES: Final = 10


@dataclass(frozen=True, slots=True)
class Bar:
    device: DeviceMemory
    parts: list[tuple[str, float, float]]
    """(kind, start, share) of each part of the device's memory."""


@dataclass(frozen=True, slots=True)
class Map:
    blocks: Blocks
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


async def memory_pieces(panel: Panel) -> dict[str, str]:
    values = await _values(panel)
    return {name: render(f"live/{name}.html", panel, **values) for name in ("devices", "maps", "marks")}


async def _values(panel: Panel) -> dict[str, Any]:
    telemetry = panel.services.telemetry
    tick = await telemetry.newest()
    return {
        "tick": tick,
        "bars": [_bar(device) for device in devices_of(tick)],
        "labels": LABELS,
        "maps": [_map(blocks) for blocks in await telemetry.blocks.read(MOST_CELLS)],
        "most_prefixes": MOST_PREFIXES,
        "engines": {engine.model: engine for engine in tick.engines},
        "marks": await telemetry.marks.since(tick.time - DAY, MOST_MARKS),
    }


def _bar(device: DeviceMemory) -> Bar:
    parts, start = [], 0.0
    for part in device.parts if device.total else ():
        share = part.size / device.total
        parts.append((part.kind, start, share))
        start += share
    return Bar(device, parts)


def _map(blocks: Blocks) -> Map:
    paths = {"live": "", "cached": "", "free": ""}
    at = 0
    for run in blocks.cells:
        paths[run.state] += _strips(at, run.count)
        at += run.count
    cells = ";".join(f"{run.count},{run.live},{run.cached},{run.owner},{run.holders}" for run in blocks.cells)
    width = min(at, COLUMNS) * CELL
    return Map(blocks, paths, width, -(-at // COLUMNS) * CELL, cells)


def _strips(first: int, count: int) -> str:
    """Return the path of neighboring squares, row by row."""
    path, last = "", first + count
    while first < last:
        row, column = divmod(first, COLUMNS)
        end = min(last, (row + 1) * COLUMNS)
        path += f"M{column * CELL} {row * CELL}h{(end - first) * CELL}v{CELL}h-{(end - first) * CELL}z"
        first = end
    return path
