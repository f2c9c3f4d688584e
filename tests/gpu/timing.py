"""Times of GPU work: graph replays over rotating inputs, variants taking turns, medians."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from llmbox.engine.runner.cuda_graphs import CudaCapture

Call = Callable[[], object]
CALLS = 8
"""Of one replay: launch gaps vanish, and each call has inputs that are not in the cache any more."""
ROUNDS = 12
COPIED, SIDE = 1 << 30, 8192
"""What peaks are measured with: bytes of a copy, and the rows and columns of a product."""


def times(variants: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Milliseconds of one call. Each variant is one call for each set of inputs."""
    replays = {name: record(calls) for name, calls in variants.items()}
    spent: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            spent[name].append(start.elapsed_time(end) / CALLS)
    return {name: statistics.median(values) for name, values in spent.items()}


def record(calls: Sequence[Call]) -> Call:
    """CALLS calls in turn as one graph; as they are where a graph cannot hold them."""

    def run() -> None:
        for n in range(CALLS):
            calls[n % len(calls)]()

    try:
        replay = CudaCapture(torch.device("cuda", torch.cuda.current_device()), side()).capture(run)
    except RuntimeError:
        torch.cuda.synchronize()
        return run
    replay()
    torch.cuda.synchronize()
    return replay


@cache
def side() -> torch.cuda.Stream:
    """One for all captures: libraries keep memory for each stream that they were ever used on."""
    return torch.cuda.Stream()


def peaks() -> dict[str, float]:
    """What this card reaches: bytes a second of a copy, both ways counted, and of reading alone; operations a
    second.
    """
    block = torch.empty(COPIED, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(block)
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    work: dict[str, Sequence[Call]] = {
        "copy": [lambda: other.copy_(block)],
        "read": [lambda half=half: half.sum() for half in block.view(torch.float32).chunk(2)],
        "bf16": [lambda: torch.mm(a, b)],
    }
    if torch.cuda.get_device_capability() >= (8, 9):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        work["fp8"] = [
            lambda: torch._scaled_mm(
                a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        ]
    spent = times(work)
    found = {"bytes": 2 * block.nbytes / spent["copy"] * 1e3, "read": block.nbytes / 2 / spent["read"] * 1e3}
    found |= {name: 2 * SIDE**3 / spent[name] * 1e3 for name in ("bf16", "fp8") if name in spent}
    return found
