"""Time series. The page's script reads them from the admin API, then follows the event stream."""

from dataclasses import dataclass

from litestar import Response, get

from .render import PanelRequest, page, panel_of

RANGES = (("600", "10 min"), ("3600", "1 h"), ("21600", "6 h"), ("86400", "24 h"), ("604800", "7 d"))


@dataclass(frozen=True, slots=True)
class Plot:
    """`series` are names of the history, with a label each; `unit` says how values are written."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


PLOTS = (
    Plot("Tokens a second", "rate", (("tokens_out", "out"), ("tokens_in", "in"))),
    Plot("Requests", "count", (("running", "running"), ("waiting", "waiting"))),
    Plot("Time to first token", "seconds", (("ttft_p50", "p50"), ("ttft_p95", "p95"))),
    Plot("Time per output token", "seconds", (("tpot_p50", "p50"), ("tpot_p95", "p95"))),
    Plot("KV cache and prefix cache", "share", (("kv_used", "KV in use"), ("prefix_hit", "prefix hits"))),
    Plot("Processor", "share", (("cpu", "CPU"),)),
    Plot("Memory and disk left", "bytes", (("memory_available", "memory"), ("disk_free", "disk"))),
)


@get("/telemetry", name="panel_telemetry")
async def telemetry_page(request: PanelRequest, range: str = "600") -> Response[str]:  # noqa: A002 - as in the URL
    tick = await panel_of(request).services.telemetry.newest()
    plots = list(PLOTS)
    for gpu in tick.gpus.devices:
        name = f"gpu{gpu.index}"
        plots += [
            Plot(f"GPU {gpu.index} utilisation", "share", ((f"{name}.utilisation", "busy"),)),
            Plot(
                f"GPU {gpu.index} memory",
                "bytes",
                ((f"{name}.memory_ours", "ours"), (f"{name}.memory_others", "others")),
            ),
            Plot(f"GPU {gpu.index} power", "watts", ((f"{name}.power", "power"),)),
        ]
    known = range if range in dict(RANGES) else RANGES[0][0]
    return page(request, "telemetry.html", "telemetry", plots=plots, ranges=RANGES, chosen=known, tick=tick)
