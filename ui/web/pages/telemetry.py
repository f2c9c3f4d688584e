"""Telemetry page: time series. Its script reads them from the admin API, then follows the event stream."""

from collections.abc import Iterator
from dataclasses import dataclass

from litestar import Response, get
from litestar.params import FromQuery

from llmbox.app.telemetry.snapshot import NA, GpuReading

from ..render import PanelRequest, page, panel_of

MOST_MARKS = 50
RANGES = (("600", "10 min"), ("3600", "1 h"), ("21600", "6 h"), ("86400", "24 h"), ("604800", "7 d"))


@dataclass(frozen=True, slots=True)
class Plot:
    """Plot of time series. `series` holds names of the history with labels; `unit` is the format of
    values.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    note: str = ""
    """Reason why there is no recent data."""


PLOTS = (
    Plot("Tokens a second", "rate", (("tokens_out", "out"), ("tokens_in", "in"))),
    Plot("Requests", "count", (("running", "running"), ("waiting", "waiting"))),
    Plot("Time to first token", "seconds", (("ttft_p50", "p50"), ("ttft_p95", "p95"))),
    Plot("Time per output token", "seconds", (("tpot_p50", "p50"), ("tpot_p95", "p95"))),
    Plot("KV cache and prefix cache", "share", (("kv_used", "KV in use"), ("prefix_hit", "prefix hits"))),
    Plot("Failed requests, over five minutes", "share", (("error_rate", "failed"),)),
    Plot("Processor", "share", (("cpu", "CPU"),)),
    Plot("Memory and disk left", "bytes", (("memory_available", "memory"), ("disk_free", "disk"))),
)
GPU_PLOTS = (
    ("utilisation", "share", "utilisation"),
    ("memory held by us", "bytes", "memory_ours"),
    ("memory held by others", "bytes", "memory_others"),
    ("temperature", "degrees", "temperature"),
    ("power", "watts", "power"),
    ("clock", "megahertz", "clock_sm"),
    ("PCIe in, a second", "bytes", "pcie_in"),
    ("PCIe out, a second", "bytes", "pcie_out"),
    ("NVLink in, a second", "bytes", "nvlink_in"),
    ("NVLink out, a second", "bytes", "nvlink_out"),
)
"""(title, unit, series) of plots with one line for each GPU."""


@get("/telemetry", name="panel_telemetry")
async def telemetry_page(request: PanelRequest, range: FromQuery[str] = "600") -> Response[str]:  # noqa: A002 - as in the URL
    telemetry = panel_of(request).services.telemetry
    tick = await telemetry.newest()
    chosen = range if range in dict(RANGES) else RANGES[0][0]
    marks = await telemetry.marks.since(tick.time - int(chosen))
    return page(
        request,
        "telemetry.html",
        "telemetry",
        plots=[*PLOTS, *_gpu_plots(tick.gpus.devices)],
        ranges=RANGES,
        chosen=chosen,
        tick=tick,
        marks=marks[:MOST_MARKS],
    )


def _gpu_plots(gpus: tuple[GpuReading, ...]) -> Iterator[Plot]:
    for title, unit, name in GPU_PLOTS if gpus else ():
        lines = tuple((f"gpu{gpu.index}.{name}", f"GPU {gpu.index}") for gpu in gpus)
        known = any(getattr(gpu, name) is not NA for gpu in gpus)
        problem = next((f"GPU {gpu.index}: {gpu.problem}." for gpu in gpus if gpu.problem), "")
        note = "" if known else problem or f"{gpus[0].name} does not report it."
        yield Plot(f"GPU {title}", unit, lines, note)
