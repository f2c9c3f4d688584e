"""Overview page: alerts, current load, charts of one day, devices, models."""

import time
from dataclasses import dataclass
from typing import Any

from litestar import Response, get

from llmbox.app.http.admin.models import describe_all

from .. import sparkline as spark
from ..render import Panel, PanelRequest, page, panel_of, render

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
    return {
        name: render(f"live/{name}.html", panel, **values) for name in ("attention", "now", "boxes", "loaded")
    }


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
        path = spark.path(spark.downsample(values, 240))
        made.append(DayChart(label, kind, path, max(known) if known else None))
    return made
