"""Kernels that move little, each beside what torch has for it: launches are most of what they cost."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from gpu import kernel_speed as big
from gpu import sampler_speed
from gpu.kernel_speed import BF16, Work, randn
from llmbox.engine.runner.gpu_inputs import decode_inputs_in_torch
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.sampling_types import DecodeInputs, DecodeRows
from llmbox.kernels.triton.backend import triton_ops

CONTEXT_BLOCKS = 256


def all_work() -> Iterator[Callable[[], Work]]:
    for rows in (64, 8192):
        yield partial(embedding, rows, None)
        yield partial(embedding, rows, "int8")
    yield partial(advance, 256)
    yield from sampler_speed.all_work()


def embedding(rows: int, quant: str | None) -> Work:
    ops = triton_ops(big.DEVICE, BF16, QUANTS.get(quant or ""))
    weight = randn(big.VOCAB, big.HIDDEN)
    table = ops.pack_embedding(weight, True)
    ids = torch.randint(big.VOCAB, (8, rows), device=big.DEVICE)
    variants = {"ours": [partial(ops.embedding, table, row) for row in ids]}
    if quant is None:
        variants["eager"] = [partial(F.embedding, row, weight) for row in ids]
    read = 2.0 if quant is None else QUANTS[quant].bytes_per_weight
    return Work(
        f"embedding, {rows} rows, {quant or 'bf16'}", rows * big.HIDDEN * (read + 2), 0, "bf16", variants
    )


def advance(rows: int) -> Work:
    ops, device = triton_ops(big.DEVICE, BF16), big.DEVICE

    def int32(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int32, device=device)

    ids = torch.ones(rows, dtype=torch.int64, device=device)
    state = DecodeRows(ids, int32(rows), int32(rows, CONTEXT_BLOCKS))
    inputs = DecodeInputs(int32(rows), int32(rows), int32(rows))
    # None drawn: lengths stay, however often it is called.
    variants = {
        "ours": [partial(ops.prepare_decode_inputs, state, None, inputs, 16)],
        "eager": [partial(decode_inputs_in_torch, state.tables_RB, state.lengths_R, 16)],
    }
    return Work(f"advance, {rows} rows", rows * 5 * 4, 0, "bf16", variants)
