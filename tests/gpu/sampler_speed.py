"""The sampler's kernels: whole rows, with rules and without."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpu import kernel_speed as big
from gpu.kernel_speed import BF16, Work, randn
from llmbox.kernels.sampling_types import PenaltyState, SampleRows
from llmbox.kernels.triton.backend import triton_ops

KINDS = {"greedy": (0.0, 1.0), "whole": (1.0, 1.0), "top-p": (1.0, 0.9)}
"""Temperature and top-p."""
LISTED, REPETITION = 500, 1.1


def all_work() -> Iterator[Callable[[], Work]]:
    for rows in (1, 64, 256):
        for kind in KINDS:
            yield partial(sampling, rows, kind)
        yield partial(penalties, rows)


def asked(rows: int, kind: str) -> SampleRows:
    numbers = (torch.full((rows,), x, device=big.DEVICE, dtype=torch.float64) for x in (*KINDS[kind], 0.0))
    temperature, top_p, min_p = numbers
    ints = torch.zeros(rows, device=big.DEVICE, dtype=torch.int32)
    seeds = torch.arange(rows, device=big.DEVICE)
    return SampleRows(temperature, ints, top_p, min_p, seeds, seeds, ints)


def sampling(rows: int, kind: str) -> Work:
    ops, drawn = triton_ops(big.DEVICE, BF16), asked(rows, kind)
    sets = [4 * randn(rows, big.VOCAB) for _ in range(2)]
    softmax = lambda x: torch.multinomial(torch.softmax(x.float(), -1), 1)  # noqa: E731
    variants = {
        "ours": [partial(ops.sample, x, drawn) for x in sets],
        "softmax, multinomial": [partial(softmax, x) for x in sets],
    }
    return Work(f"sample {rows} rows, {kind}", rows * big.VOCAB * 2, 0, "bf16", variants)


def penalties(rows: int) -> Work:
    """Beside rows copied to float32 and changed there, then drawn by the same kernel."""
    ops, drawn = triton_ops(big.DEVICE, BF16), asked(rows, "top-p")
    sets = [4 * randn(rows, big.VOCAB) for _ in range(2)]
    ids = torch.stack([torch.randperm(big.VOCAB, device=big.DEVICE)[:LISTED] for _ in range(rows)])
    rules = listed(ids)

    def copied(x: Tensor) -> object:
        wide = x.float()
        old = wide.gather(1, ids)
        wide.scatter_(1, ids, torch.where(old > 0, old / REPETITION, old * REPETITION))
        return ops.sample(wide, drawn)

    variants = {
        "ours": [partial(ops.sample, x, drawn, rules) for x in sets],
        "copied": [partial(copied, x) for x in sets],
    }
    return Work(f"sample {rows} rows, penalties", rows * big.VOCAB * 2, 0, "bf16", variants)


def listed(ids: Tensor) -> PenaltyState:
    """All of the prompt, none drawn yet."""
    rows, count = ids.shape
    where = ids.device
    facts, marks = torch.zeros(rows, 5, dtype=torch.int64), torch.zeros(3, rows * count, dtype=torch.int32)
    facts[:, 0], facts[:, 1] = torch.arange(rows) * count, count
    marks[0] = ids.flatten().cpu()
    nothing = torch.zeros(rows + 1, dtype=torch.int64, device=where)
    return PenaltyState(
        row_S=torch.arange(rows, device=where),
        facts_R5=facts.to(where),
        penalties_R3=torch.tensor([[REPETITION, 0.0, 0.0]] * rows, device=where),
        last_R=nothing,
        marks_3N=marks.to(where),
        values_3N=torch.zeros(3, rows * count, device=where),
        word_starts_S1=nothing.int(),
        word_last_W=nothing,
        word_id_W=nothing,
    )
