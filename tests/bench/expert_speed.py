"""A layer of experts in the shape of Qwen3-30B-A3B beside an MLP of as many inner rows, on one thread.

    python -P tests/bench/expert_speed.py [FORMAT...] [--rows 1,8,32,192] [--passes 8] [--kernels "cpu avx2"]

In this thread's own CPU time, the best of all passes for each call, as `kernel_speed.py`. Rows choose at
random; the MLP is there several times, so that neither lies in a cache. FORMAT is none (bfloat16) or a name
of QUANTS.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.op_types import Mixture
from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.quant_formats import QUANTS

sys.path.insert(0, str(Path(__file__).parent))

from kernel_speed import best

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
CALLS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=["none", "int8", "int4"])
    parser.add_argument("--rows", default="1,8,32,192")
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--kernels", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend = load_backend(options.kernels)
    backend.use_threads([0])
    for name in options.formats:
        measure(
            backend.ops(QUANTS.get(name)),
            name,
            [int(rows) for rows in options.rows.split(",")],
            options.passes,
        )


def measure(ops: Ops, name: str, row_counts: list[int], passes: int) -> None:
    mixture = Mixture(*mlps(ops, INNER, EXPERTS), EXPERTS, CHOSEN, True)
    dense = mlps(ops, INNER * CHOSEN, CALLS)
    for rows in row_counts:
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
        of_experts = best(
            [partial(ops.experts, mixture, x, torch.randn(rows, EXPERTS)) for _ in range(CALLS)], passes
        )
        of_mlps = best([partial(mlp, ops, *pair, x) for pair in zip(*dense, strict=True)], passes)
        speed = 2 * rows * CHOSEN * 3 * HIDDEN * INNER * CALLS / of_experts / 1e9
        print(
            f"{name:10} {rows:4} rows: experts {of_experts / CALLS * 1e3:9.3f} ms, {speed:6.0f} Gop/s; "
            f"MLP {of_mlps / CALLS * 1e3:9.3f} ms"
        )


def mlps(ops: Ops, inner: int, count: int) -> tuple[list[PackedLinear], list[PackedLinear]]:
    gate_up = torch.randn(2 * inner, HIDDEN, dtype=torch.bfloat16) / 50
    down = torch.randn(HIDDEN, inner, dtype=torch.bfloat16) / 50
    gate_ups = [ops.pack_linear(gate_up, None) for _ in range(count)]
    return gate_ups, [ops.pack_linear(down, None) for _ in range(count)]


def mlp(ops: Ops, gate_up: PackedLinear, down: PackedLinear, x_TE: Tensor) -> Tensor:
    return ops.linear(down, ops.gate_mul(ops.linear(gate_up, x_TE), "silu"))


if __name__ == "__main__":
    main()
