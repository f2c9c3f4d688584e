"""Overview page: alerts, current load, charts of one day, devices, models."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Response, get

from llmbox.app.http.admin.models import describe_all

from ..render import Panel, PanelRequest, page, panel_of, render

WIDTH, HEIGHT = 240.0, 44.0


def sparkline_path(values: Sequence[float | None]) -> str:
    """Return the path of a line over WIDTH x HEIGHT, from zero to the largest value, with gaps at missing
    values.

    A lone value is a dot: a line of no length with round ends.
    """
    known = [value for value in values if value is not None]
    if not known or len(values) < 2:
        return ""
    top = max(known) or 1.0
    step = WIDTH / (len(values) - 1)
    parts, pen_down = [], False
    for index, value in enumerate(values):
        if value is None:
            pen_down = False
            continue
        y = HEIGHT - 2 - (HEIGHT - 4) * value / top
        at = f"{index * step:.1f} {y:.1f}"
        parts.append(f"L{at}" if pen_down else f"M{at}L{at}")
        pen_down = True
    return "".join(parts)


def downsample(values: Sequence[float | None], most: int) -> list[float | None]:
    """Downsample by means of neighbors, so that a day fits into a few hundred points."""
    if len(values) <= most:
        return list(values)
    width = len(values) / most
    groups = [values[int(i * width) : int((i + 1) * width)] for i in range(most)]
    means: list[float | None] = []
    for group in groups:
        known = [value for value in group if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


DAY = 86400
CHARTS = (
    ("tokens_out", "Output tokens / s", "rate"),
    ("ttft_p95", "Time to first token, p95", "span"),
    ("kv_used", "KV cache in use", "percent"),
    ("error_rate", "Failed requests", "percent"),
)


@dataclass(frozen=True, slots=True)
class DayChart:
    """Chart of one metric over a day, as an SVG path."""

    label: str
    kind: str
    path: str
    most: float | None


@get("/", name="panel_overview")
async def overview_page(request: PanelRequest) -> Response[str]:
    panel = panel_of(request)
    values = await _now(panel)
    return page(request, "overview.html", "overview", charts=await _day(panel), **values)


async def overview_pieces(panel: Panel) -> dict[str, str]:
    values = await _now(panel)
    templates = {name: f"live/{name}.html" for name in ("attention", "now", "boxes")}
    templates["loaded"] = "live/models/loaded.html"
    return {name: render(template, panel, **values) for name, template in templates.items()}


async def _now(panel: Panel) -> dict[str, Any]:
    tick = await panel.services.telemetry.newest()
    rates = {each.model: each for each in tick.error_rates}
    return {"tick": tick, "models": describe_all(panel.control), "rates": rates}


async def _day(panel: Panel) -> list[DayChart]:
    since = int(time.time()) - DAY
    names = [name for name, _, _ in CHARTS]
    chart = await panel.services.telemetry.history.chart(60, since, names)
    by_minute = {moment: index for index, moment in enumerate(chart.times)}
    minutes = range(since // 60 * 60, int(time.time()) + 1, 60)
    made = []
    for name, label, kind in CHARTS:
        column = chart.series[name]
        values = [column[by_minute[minute]] if minute in by_minute else None for minute in minutes]
        known = [value for value in values if value is not None]
        path = sparkline_path(downsample(values, 240))
        made.append(DayChart(label, kind, path, max(known) if known else None))
    return made
