"""Constants that follow from arithmetic until a GPU has timed them: tiles, warps, stages, splits of contexts.

All variants are compiled first, by many processes, then timed by one, in turns.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch

from gpu import apart, kernel_speed, linear_shapes
from gpu.kernel_speed import BF16, FP8
from gpu.report import Report
from gpu.timing import Call, times
from llmbox.kernels.triton.attention import attention
from llmbox.kernels.triton.attention import attention_metadata as splits
from llmbox.kernels.triton.linear import gemm
from llmbox.kernels.triton.linear.tile_config import Tile, has_fp8

SILENCE = 60.0
"""Seconds to compile one variant, or to time those of a load."""
BEST = 5
BATCHES = ((1, 8192), (64, 2048), (256, 1536))
"""Of decoding: requests and their contexts."""
FEW_ROWS = (1, 16, 64)
PROMPT = 8192
COMPILING = 0.5
"""Share of the section's time in which variants are compiled; what is not is left out of the timing."""


class Variant(NamedTuple):
    """What is put in place of the constants while a kernel is launched."""

    tile: Tile
    waves: int | None = None

    def __str__(self) -> str:
        tile = f"{self.tile.rows} x {self.tile.columns}, {self.tile.warps} warps, {self.tile.stages} stages"
        return tile if self.waves is None else f"{tile}, {self.waves} programs a multiprocessor"


class Load(NamedTuple):
    """`place`: module and name of the function that chooses a tile."""

    name: str
    calls: Callable[[], Sequence[Call]]
    place: tuple[Any, str]
    variants: list[Variant]


def loads() -> list[Load]:
    device = kernel_speed.DEVICE
    found = []
    for kv_dtype in (BF16, torch.int8, FP8) if has_fp8(device) else (BF16, torch.int8):
        for batch, context in BATCHES:
            calls = partial(ours, kernel_speed.decode, batch, context, kv_dtype)
            name = f"decode {batch} x {context}, KV {str(kv_dtype)[6:]}"
            found.append(Load(name, calls, (attention, "decode_tile"), decoding_variants()))
    prompt = partial(ours, kernel_speed.prefill, PROMPT, 0)
    found.append(Load(f"prompt of {PROMPT}", prompt, (attention, "prefill_tile"), prompt_variants()))
    for rows in FEW_ROWS:
        calls = partial(ours, linear_shapes.product, "o", rows, named="Triton")
        found.append(Load(f"product o, {rows} rows", calls, (gemm, "tile_for"), product_variants(rows)))
    return found


def decoding_variants() -> list[Variant]:
    sizes = product((32, 64, 128), (4, 8), (3, 5), (8, 16))
    return [Variant(Tile(16, columns, warps, stages), waves) for columns, warps, stages, waves in sizes]


def prompt_variants() -> list[Variant]:
    return [Variant(Tile(*sizes)) for sizes in product((64, 128), (32, 64, 128), (4, 8), (3, 5))]


def product_variants(rows: int) -> list[Variant]:
    height = max(16, rows)
    return [Variant(Tile(height, *sizes)) for sizes in product((32, 64, 128), (4, 8), (3, 4, 5, 6))]


def ours(make: Callable[..., kernel_speed.Work], *arguments: Any, named: str = "ours") -> Sequence[Call]:
    return make(*arguments).variants[named]


def launched(variant: Variant, place: tuple[Any, str], call: Call) -> object:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(*place, lambda *_, **__: variant.tile))
        if variant.waves is not None:
            stack.enter_context(mock.patch.object(splits, "WAVES", variant.waves))
        return call()


def report_best(report: Report) -> None:
    report.section("Constants of kernels, the best of those tried")
    compiled: list[str] = []

    def hear(name: str, message: object, _took: float) -> None:
        if isinstance(message, apart.Ended) and not message.error:
            compiled.append(name)

    processes = max(1, min(12, (os.cpu_count() or 1) - 2))
    end = time.monotonic() + COMPILING * report.left
    left_out = apart.run(apart.Make(compilations), hear, end=end, limit=SILENCE, processes=processes)
    whole = len(apart.Make(compilations).pieces())
    report.say(f"{len(compiled)} of {whole} variants compile and run; {len(left_out)} were out of time.")
    apart.tell_lines(report, apart.Make(timings, (frozenset(compiled),)), limit=SILENCE)


def compilations() -> list[apart.Piece]:
    return [
        apart.Piece(named(load, variant), partial(compile_one, load, variant))
        for load in loads()
        for variant in load.variants
    ]


def named(load: Load, variant: Variant) -> str:
    return f"{load.name}: {variant}"


def compile_one(load: Load, variant: Variant, _say: apart.Say) -> None:
    launched(variant, load.place, load.calls()[0])
    torch.cuda.empty_cache()


def timings(compiled: frozenset[str]) -> Iterator[apart.Piece]:
    for load in loads():
        variants = [variant for variant in load.variants if named(load, variant) in compiled]
        yield apart.Piece(f"tuning {load.name}", partial(time_load, load, variants))


def time_load(load: Load, variants: list[Variant], say: apart.Say) -> None:
    """Beside what is used today."""
    report, calls = Report(SILENCE, listener=say), load.calls()
    turns: dict[str, Sequence[Call]] = {"as it is": calls}
    turns |= {str(each): [partial(launched, each, load.place, call) for call in calls] for each in variants}
    spent = times(turns)
    today = spent.pop("as it is")
    report.say(f"\n### {load.name}: {today:.4f} ms as it is\n")
    report.table("variant", "ms", "of today's")
    for name, ms in sorted(spent.items(), key=lambda each: each[1])[:BEST]:
        report.row((name, f"{ms:.4f}", f"{ms / today:.1%}"))
    torch.cuda.empty_cache()
