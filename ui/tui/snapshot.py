"""Snapshot of `llmbox top --once`: read in one go, written as plain text or as JSON."""

import json
import shutil
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from llmbox.app.store.record import LiveRequest
from llmbox.app.telemetry.snapshot import Tick

from .data.api import Api
from .messages import SPARKS, DashboardState, count_requests
from .rendering import ASCII, PLAIN, Glyphs, Line, clean, count, fit, heading, percent, seconds
from .screens.overview import device_lines, event_lines, model_rows
from .screens.requests import request_rows
from .widgets.charts import chart_lines
from .widgets.lines import Row

SCHEMA: Final = "llmbox.top/1"
LAST: Final = 10
WIDTHS: Final = (72, 120)
"""Minimum and maximum width of the text."""


def read_snapshot(api: Api) -> DashboardState:
    """Read the current state. Raises CliError."""
    state = DashboardState()
    tick = msgspec.convert(api.get("tick"), Tick)
    history = api.get("requests?limit=300")
    live = msgspec.convert(history["in_flight"], tuple[LiveRequest, ...])
    totals = replace(tick.totals, open_requests=len(live))
    state.take_answer("downloads", api.get("downloads"))
    state.take_tick(replace(tick, requests=live, totals=totals))
    state.take_answer("history", history)
    state.take_answer("past", api.get(f"telemetry?step=1&series={','.join(SPARKS)}"))
    state.take_answer("marks", api.get("marks?since=0&limit=50"))
    return state


def snapshot_json(state: DashboardState) -> str:
    """Return the snapshot as one JSON object; docs/top.md has its fields."""
    tick = state.tick
    assert tick is not None
    known = msgspec.to_builtins(tick)
    counts = count_requests(tick)
    models = []
    for engine in known["engines"]:
        own = count_requests(tick, engine["model"])
        models.append(engine | {"running": own.running, "waiting": own.queued})
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "time": tick.time,
        "ready": tick.ready,
        "cause": tick.cause,
        "alerts": msgspec.to_builtins(state.alerts),
        "requests": {"in_flight": counts.in_flight, "running": counts.running, "queued": counts.queued,
                     "live": known["requests"], "last": list(state.ended)[:LAST]},
        "totals": known["totals"] | {"running": counts.running, "waiting": counts.queued},
        "error_rates": known["error_rates"],
        "models": models,
        "gpus": known["gpus"],
        "host": known["host"],
        "history": {"step": 1, "series": {
            name: [None if value < 0 else value for value in values] for name, values in state.sparks.items()
        }},
    }  # fmt: skip
    return json.dumps(answer, ensure_ascii=False)


def snapshot_lines(state: DashboardState, *, ascii_only: bool = False) -> list[str]:
    """Return the overview as lines of plain text, as wide as the terminal within `WIDTHS`."""
    tick, glyphs = state.tick, ASCII if ascii_only else PLAIN
    assert tick is not None
    width = max(WIDTHS[0], min(WIDTHS[1], shutil.get_terminal_size((100, 40)).columns))
    totals = tick.totals
    status = "ready" if tick.ready else f"not ready: {tick.cause}"
    lines: list[Line] = [((f" llmbox: {clean(status)}; {count_requests(tick)}", ""),)]
    figures = (
        f" {count(totals.tokens_out)} tok/s out, {count(totals.tokens_in)} tok/s in; "
        f"TTFT p50 {seconds(totals.ttft_p50)}, p95 {seconds(totals.ttft_p95)}; "
        f"TPOT p50 {seconds(totals.tpot_p50)}, p95 {seconds(totals.tpot_p95)}; "
        f"failed {percent(totals.error_rate)}"
    )
    lines += [((figures, ""),), (), heading(" Alerts", width - 1, glyphs, "" if state.alerts else "none")]
    for alert in state.alerts:
        lines.append(((f" {alert.level}: {clean(alert.text)}", ""),))
        if alert.fix:
            lines.append(((f"     do: {clean(alert.fix)}", ""),))
    lines += [(), *device_lines(tick, width, glyphs, tall=60), ()]
    lines.append(heading(" Models", width - 1, glyphs, f"{len(tick.engines)} loaded"))
    lines += _table(
        model_rows(tick, glyphs), (0, 1, 3, 4, 5, 6, 8),
        ("MODEL", "STATE", "RUN", "QUEUE", "TOK/S", "TTFT P95", "KV"), width, glyphs,
    ) or [((" no model is loaded: llmbox load builtin", ""),)]  # fmt: skip
    lines += [(), *chart_lines(state, width, 2, 8, glyphs, 1), ()]
    lines.append(heading(" Requests", width - 1, glyphs, str(count_requests(tick))))
    live = tick.requests[:LAST]
    rows = request_rows(live, list(state.ended)[:LAST], tick.time)
    lines += _table(
        rows, (0, 1, 3, 4, 6, 7, 8, 9),
        ("ID", "AGE", "MODEL", "STATE", "OUTPUT", "TOK/S", "TTFT", "END"), width, glyphs,
    ) or [((" none yet", ""),)]  # fmt: skip
    lines += [(), *event_lines(state, width, 8, glyphs)]
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def _table(
    rows: list[Row], columns: tuple[int, ...], titles: tuple[str, ...], width: int, glyphs: Glyphs
) -> list[Line]:
    """Format some columns of the rows; the model's name takes the remaining width."""
    if not rows:
        return []
    texts = [[row.cells[index][0] for index in columns] for row in rows]
    sizes = [max(len(title), *(len(line[at]) for line in texts)) for at, title in enumerate(titles)]
    model = titles.index("MODEL")
    sizes[model] = max(8, min(sizes[model], width - 2 - sum(sizes) + sizes[model] - 2 * len(sizes)))
    made: list[Line] = []
    for line in [list(titles), *texts]:
        cells = [fit(text, cells, glyphs, middle=True) for text, cells in zip(line, sizes, strict=True)]
        made.append(((" " + "  ".join(cells), ""),))
    return made
