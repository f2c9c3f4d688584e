"""Speed of the linears and of attention in the shape of Qwen3-0.6B, on one thread.

    python -P tests/bench/kernel_speed.py [FORMAT...] [--rows 1,8,32,192] [--passes 8] [--kernels "cpu avx2"]

In this thread's own CPU time, the best of all passes for each layer: a busy machine hardly shows in it. To
compare two versions run them by turns. FORMAT is none (bfloat16), a name of QUANTS or of GGUF_QUANTS,
with `+order` for inputs in an order of their own (act-order), or attention.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmbox.kernels.cpu.backend import CPUBackend
from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.op_types import BatchLayout, KVShape
from llmbox.kernels.quant_formats import GGUF_QUANTS, QUANTS
from llmbox.kernels.weight_packing import BlockWeight
from support.published_formats import stored_weight

SHAPES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
FORMATS = [
    name for name, quant in QUANTS.items() if quant.on_cpu and not quant.rounds_head and not quant.is_gguf
]
LAYERS = 8
"""More than caches hold."""
QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 8, 128, 16
ATTENTION = ((1, 1000, 1), (8, 1000, 1), (32, 100, 1), (1, 0, 512), (1, 1536, 512))
"""Sequences, tokens before, new tokens."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("formats", nargs="*", default=["none", *FORMATS, "attention"])
    parser.add_argument("--rows", default="1,8,32,192")
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--kernels", default="cpu", help="an instruction set, as LLMBOX_KERNELS names it")
    options = parser.parse_args()
    known = {"none", "attention", *QUANTS, *(name for name, quant in GGUF_QUANTS.items() if quant.grid)}
    if unknown := {name.removesuffix("+order") for name in options.formats} - known:
        parser.error(f"unknown formats: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    torch.set_num_threads(1)
    backend = load_backend(options.kernels)
    backend.use_threads([0])
    for name in options.formats:
        if name == "attention":
            for kv_dtype in (torch.bfloat16, torch.int8):
                for work in ATTENTION:
                    attention(backend, kv_dtype, *work, options.passes)
        else:
            linears(backend, name, [int(rows) for rows in options.rows.split(",")], options.passes)


def random_blocks(name: str, inputs: int, outputs: int) -> BlockWeight:
    quant = GGUF_QUANTS[name]
    units, parts = inputs // quant.unit, inputs // quant.span

    def some(most: int, columns: int) -> torch.Tensor:
        return torch.randint(most, (outputs, columns), dtype=torch.uint8)

    has_parts, has_minimums = quant.unit > quant.group, quant.grid.endswith(("minimums", "pairs"))
    return BlockWeight(
        quant,
        some(1 << quant.bits, inputs),
        torch.rand(outputs, units).half() / 5000,
        torch.rand(outputs, units).half() / 5000 if has_minimums else None,
        some(64, parts) if has_parts else None,
        some(64, parts) if quant.grid == "k_minimums" else None,
    )


def linears(backend: CPUBackend, name: str, row_counts: list[int], passes: int) -> None:
    form = name.removesuffix("+order")
    quant = QUANTS.get(form)
    ops = backend.ops(quant)
    weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16) / 50 for inputs, outputs in SHAPES]
    if name in GGUF_QUANTS and GGUF_QUANTS[name].grid:
        assert ops.packing is not None
        pack = partial(ops.packing.pack_blocks, dtype=torch.bfloat16)
        packed = [pack([random_blocks(name, *shape)]) for _ in range(LAYERS) for shape in SHAPES]
    elif quant is not None and quant.in_checkpoints_only:
        assert ops.packing is not None
        stored = partial(stored_weight, quant, ordered=form != name)
        packed = [
            ops.packing.pack_quantized(stored(outputs, inputs), torch.bfloat16)
            for _ in range(LAYERS)
            for inputs, outputs in SHAPES
        ]
    else:
        packed = [ops.pack_linear(weight, None) for _ in range(LAYERS) for weight in weights]
    products = LAYERS * sum(inputs * outputs for inputs, outputs in SHAPES)
    for rows in row_counts:
        x = {inputs: torch.randn(rows, inputs, dtype=torch.bfloat16) for inputs, _ in SHAPES}
        calls = [partial(ops.linear, linear, x[linear.inputs]) for linear in packed]
        seconds = best(calls, passes)
        speed = 2 * products * rows / seconds / 1e9
        print(f"{name:20} {rows:4} rows {seconds * 1e3:9.3f} ms {speed:7.0f} Gop/s")


def attention(
    backend: CPUBackend, kv_dtype: torch.dtype, sequences: int, past: int, new: int, passes: int
) -> None:
    ops, layers, context = backend.ops(), 4, past + new
    width = -(-context // BLOCK)
    blocks = random.Random(0).sample(range(sequences * width), sequences * width)
    tables = torch.tensor(blocks, dtype=torch.int32).view(sequences, width)
    positions = torch.arange(past, context, dtype=torch.int32).repeat(sequences)
    block_T = tables.repeat_interleave(new, 0).gather(1, positions.long().view(-1, 1) // BLOCK)[:, 0]
    ragged = BatchLayout(
        block_size=BLOCK,
        query_lens=[new] * sequences,
        contexts=[context] * sequences,
        query_starts_N1=torch.arange(0, sequences * new + 1, new, dtype=torch.int32),
        context_lens_N=torch.full((sequences,), context, dtype=torch.int32),
        block_tables_NB=tables,
        positions_T=positions,
        slots_T=block_T * BLOCK + positions % BLOCK,
    )
    shape = KVShape(layers, len(blocks), BLOCK, KV_HEADS, HEAD_DIM, kv_dtype, torch.bfloat16)
    cache = ops.make_kv_cache(shape, torch.device("cpu"))
    ops.clear_blocks(cache, blocks)
    plan = ops.plan_attention(ragged, cache, None)
    q = torch.randn(sequences * new, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    calls = [partial(ops.attention, q, cache, layer, plan, HEAD_DIM**-0.5) for layer in range(layers)]
    seconds = best(calls, passes) / layers
    kind = str(kv_dtype).removeprefix("torch.")
    print(f"{kind:10} {sequences:2} x {past:4} + {new:3} {seconds * 1e3:9.3f} ms a layer")


def best(calls: list[Callable[[], object]], passes: int) -> float:
    """Seconds of all calls together, each at its best."""
    times = [float("inf")] * len(calls)
    for _ in range(passes):
        for number, call in enumerate(calls):
            started = time.thread_time()
            call()
            times[number] = min(times[number], time.thread_time() - started)
    return sum(times)


if __name__ == "__main__":
    main()
