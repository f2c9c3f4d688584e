"""List for terminals too small for screens: one fact a line, the most important first."""

from ..data.state import State
from ..rendering import Glyphs, Line, Span, clean, count, percent, seconds
from .lines import cut


def compact_lines(state: State, width: int, glyphs: Glyphs) -> list[Line]:
    tick = state.tick
    if state.lost:
        return [cut(((f"{glyphs.warning} daemon gone", "bad"),), width, glyphs)]
    if tick is None:
        return [(("waiting", "muted"),)]
    totals = tick.totals
    facts: list[tuple[str, str]] = [
        ("out", f"{count(totals.tokens_out)} tok/s"),
        ("in", f"{count(totals.tokens_in)} tok/s"),
        ("requests", f"{totals.running} run, {totals.waiting} wait"),
        ("failed", percent(totals.error_rate)),
        ("TTFT p95", seconds(totals.ttft_p95)),
        ("KV", percent(totals.kv_used)),
        ("CPU", percent(tick.host.cpu)),
    ]
    facts += [(f"GPU {gpu.index}", gpu.problem or percent(gpu.utilisation)) for gpu in tick.gpus.devices]
    facts += [(engine.state, engine.model) for engine in tick.engines]
    lines: list[tuple[Span, ...]] = [
        ((f"{glyphs.warning} {clean(each.text)}", "bad" if each.level == "failure" else "warn"),)
        for each in tick.attention
    ]
    lines += [((f"{name:<9}", "muted"), (clean(text), "")) for name, text in facts]
    lines += [((f"{request.id}", ""), (f" {request.state}", "muted")) for request in tick.requests]
    return [cut(line, width, glyphs) for line in lines]
