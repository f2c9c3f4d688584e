"""Where memory goes: weights, KV blocks by state, workspace, per model."""

from dataclasses import dataclass

from litestar import Response, get

from llmbox.app.telemetry.snapshot import Engine, Tick

from .render import Panel, PanelRequest, page, panel_of, render

MOST_CELLS = 480
COLUMNS = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One or more blocks that share a state. Places are in the map's own units."""

    x: int
    y: int
    state: str
    title: str


@dataclass(frozen=True, slots=True)
class Map:
    engine: Engine
    cells: list[Cell]
    blocks_a_cell: int
    rows: int
    parts: list[tuple[str, float, float]]
    """(kind, start, share) of the model's memory."""


@get("/memory", name="panel_memory")
async def memory_page(request: PanelRequest) -> Response[str]:
    tick = await panel_of(request).services.telemetry.newest()
    return page(request, "memory.html", "memory", maps=maps_of(tick), tick=tick)


async def memory_pieces(panel: Panel) -> dict[str, str]:
    tick = await panel.services.telemetry.newest()
    return {"maps": render("live/maps.html", panel, maps=maps_of(tick))}


def maps_of(tick: Tick) -> list[Map]:
    return [_map(engine) for engine in tick.engines if engine.blocks_total]


def _map(engine: Engine) -> Map:
    each = -(-engine.blocks_total // MOST_CELLS)
    cells = []
    edges = (engine.blocks_live, engine.blocks_live + engine.blocks_cached)
    for index, first in enumerate(range(0, engine.blocks_total, each)):
        state = "used" if first < edges[0] else "cached" if first < edges[1] else "free"
        word = {"used": "in use", "cached": "cached", "free": "free"}[state]
        last = min(first + each, engine.blocks_total)
        tokens = (last - first) * engine.block_size
        title = f"{last - first} of {engine.blocks_total} blocks, {tokens} tokens: {word}"
        cells.append(Cell(index % COLUMNS * 10, index // COLUMNS * 10, state, title))
    return Map(engine, cells, each, -(-len(cells) // COLUMNS) * 10, _parts(engine))


def _parts(engine: Engine) -> list[tuple[str, float, float]]:
    whole = engine.weights_bytes + engine.kv_bytes + engine.workspace_bytes
    if not whole:
        return []
    block = engine.kv_bytes / engine.blocks_total
    sizes = (
        ("weights", engine.weights_bytes),
        ("used", engine.blocks_live * block),
        ("cached", engine.blocks_cached * block),
        ("free", engine.blocks_free * block),
        ("others", engine.workspace_bytes),
    )
    parts, start = [], 0.0
    for kind, size in sizes:
        parts.append((kind, start, size / whole))
        start += size / whole
    return parts
