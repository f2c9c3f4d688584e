"""Screen 4: who holds the memory of each device, and how full the KV caches are."""

from collections.abc import Iterable

from textual.widget import Widget

from llmbox.app.telemetry.snapshot import NA, Engine, Gpu, Tick

from .lines import Lines, cut
from .state import State
from .text import DASH, Glyphs, Line, Span, bar, clean, count, heading, known, percent, seconds, size
from .view import View


class Memory(View):
    TITLE = "Memory"
    AUTO_FOCUS = ""

    def body(self) -> Iterable[Widget]:
        yield Lines(id="memory")

    def draw(self) -> None:
        width = self.size.width
        lines = memory_lines(self.state, width, self.glyphs)
        self.query_one("#memory", Lines).show([cut(line, width, self.glyphs) for line in lines])


def memory_lines(state: State, width: int, glyphs: Glyphs) -> list[Line]:
    tick = state.tick
    if tick is None:
        return [((" waiting for the first reading", "muted"),)]
    lines = [heading(" Devices", width - 1, glyphs), *_legend(glyphs)]
    for gpu in tick.gpus.devices:
        lines += _gpu(gpu, tick, width, glyphs)
    lines += _host(tick, width, glyphs)
    if links := _links(tick):
        lines.append(((f" links  {links}", "muted"),))
    lines += [(), heading(" KV caches", width - 1, glyphs)]
    for engine in tick.engines:
        lines += _cache(engine, width, glyphs)
    if not tick.engines:
        lines.append(((" No model is loaded. Press 3 to load one.", "muted"),))
    lines += [(), heading(" Loads and evictions", width - 1, glyphs)]
    for event in list(state.model_events)[:12]:
        tone = "bad" if event.kind.endswith(("failed", "restarting")) else "muted"
        what = f" {event.kind.partition('.')[2] or event.kind:<12}"
        lines.append(((what, tone), (clean(event.model), ""), (f"  {clean(event.cause)}", "muted")))
    if not state.model_events:
        lines.append(((" Nothing was loaded or unloaded since the daemon started.", "muted"),))
    return lines


def _legend(glyphs: Glyphs) -> list[Line]:
    names = (("weights", "accent"), ("KV in use", "kv"), ("KV cached", "cached"), ("KV free", "kvfree"),
             ("workspace", "work"), ("others", "others"), ("free", "rule"))  # fmt: skip
    spans: list[Span] = [(" ", "")]
    for name, tone in names:
        spans += [(glyphs.bar if name != "free" else glyphs.rest, tone), (f" {name}  ", "muted")]
    return [tuple(spans)]


def _gpu(gpu: Gpu, tick: Tick, width: int, glyphs: Glyphs) -> list[Line]:
    title = f" GPU {gpu.index} {clean(gpu.name)}"
    if gpu.problem:
        return [((title, "strong"), (f"  {glyphs.warning} {clean(gpu.problem)}", "bad"))]
    engines = [engine for engine in tick.engines if _is_on(engine, gpu.index)]
    others = known(gpu.memory_others)
    note = "" if gpu.memory_ours is not NA else "  the driver does not tell whose memory is whose"
    return _device(
        title + note, known(gpu.memory_total), known(gpu.memory_free), others, engines, width, glyphs
    )


def _host(tick: Tick, width: int, glyphs: Glyphs) -> list[Line]:
    total, free = known(tick.host.memory_total), known(tick.host.memory_available)
    if not total:
        return [((f" RAM {DASH}", "muted"),)]
    engines = [engine for engine in tick.engines if engine.device == "cpu"]
    planned = sum(engine.weights_bytes + engine.kv_bytes + engine.workspace_bytes for engine in engines)
    # What is planned is not all touched yet: the pages of a KV pool come as they are used.
    others = max(0.0, total - free - planned)
    return _device(" RAM", total, free, others, engines, width, glyphs)


def _device(
    title: str, total: float, free: float, others: float, engines: list[Engine], width: int, glyphs: Glyphs
) -> list[Line]:
    if total <= 0:
        return [((title, "strong"), (f"  {DASH}", "muted"))]
    parts: list[tuple[float, str]] = []
    details: list[Line] = []
    for engine in engines:
        block = engine.kv_bytes / engine.blocks_total if engine.blocks_total else 0.0
        live, cached, rest = (
            block * number for number in (engine.blocks_live, engine.blocks_cached, engine.blocks_free)
        )
        for value, tone in (
            (engine.weights_bytes, "accent"), (live, "kv"), (cached, "cached"), (rest, "kvfree"),
            (engine.workspace_bytes, "work"),
        ):  # fmt: skip
            if value:
                parts.append((value / total, tone))
        text = (
            f"   {clean(engine.model)}: weights {size(engine.weights_bytes)}, KV {size(engine.kv_bytes)} "
            f"({size(live)} in use, {size(cached)} cached), workspace {size(engine.workspace_bytes)}"
        )
        details.append(((text, "muted"),))
    parts.append((others / total, "others"))
    note = f"  {size(free)} free of {size(total)}"
    return [((title, "strong"), (note, "muted")), ((" ", ""), *bar(parts, width - 2, glyphs)), *details]


def _cache(engine: Engine, width: int, glyphs: Glyphs) -> list[Line]:
    total = engine.blocks_total
    if not total:
        return [((f" {clean(engine.model)}", "strong"), (f"  {engine.state}", "muted"))]
    shares = [(engine.blocks_live / total, "kv"), (engine.blocks_cached / total, "cached")]
    waste = ""
    if engine.blocks_live and engine.block_size:
        filled = engine.slots_used / (engine.blocks_live * engine.block_size)
        waste = f", {percent(filled)} of their slots hold a token"
    hits = (
        f"prefix cache: {count(engine.prefix_hits)} of {count(engine.prefix_queries)} prompt tokens found"
        if engine.prefix_queries
        else "prefix cache: nothing looked up yet"
    )
    tail = f", last minute {percent(engine.prefix_hit)}" if engine.prefix_hit is not NA else ""
    counts = f"{engine.blocks_live:,} in use, {engine.blocks_cached:,} cached, {engine.blocks_free:,} free"
    preempted = f"; {engine.preemptions:,} preemptions" if engine.preemptions else ""
    speed = f"   {count(engine.tokens_out)} tok/s out, TPOT p50 {seconds(engine.tpot_p50)}"
    if engine.roofline is not NA:
        speed += f", {percent(engine.roofline)} of what the memory bandwidth allows"
    return [
        (
            (f" {clean(engine.model)}", "strong"),
            (f"  {counts} of {total:,} blocks of {engine.block_size} tokens{waste}", "muted"),
        ),
        ((" ", ""), *bar(shares, width - 2, glyphs)),
        ((f"   {hits}{tail}{preempted}", "muted"),),
        ((speed, "muted"),),
    ]


def _is_on(engine: Engine, gpu: int) -> bool:
    kind, _, index = engine.device.partition(":")
    return kind == "cuda" and (int(index) if index.isdigit() else 0) == gpu


def _links(tick: Tick) -> str:
    return "   ".join(f"GPU {link.first}-{link.second} {link.kind}" for link in tick.gpus.links)
