"""Work of the section `kernels`, each piece with a name: what faults takes no other with it."""

import time
from collections.abc import Callable
from functools import partial

import torch

from gpu import adapters, kernel_speed, linear_shapes, little_kernels, recurrent, sdpa_rule
from gpu.apart import Piece, Say
from gpu.checks import name_of
from gpu.kernel_speed import Work
from gpu.report import Report

SILENCE = 60.0
"""Seconds that a kernel and what it is compared with may take, compiling included."""


def pieces(peaks: dict[str, float], end: float) -> list[Piece]:
    """What decides most first. `end`: of `time.monotonic`."""
    work = [*linear_shapes.all_work(), *kernel_speed.all_work(), *recurrent.all_work(kernel_speed.DEVICE)]
    work += [*little_kernels.all_work(), *adapters.all_work()]
    timed = [Piece(title(make), partial(row, make, peaks)) for make in work]
    return [*timed, Piece("long prompts through SDPA", partial(long_prompts, end))]


def title(make: Callable[[], Work]) -> str:
    """Known before its tensors are made."""
    if not isinstance(make, partial):
        return make.__name__
    named = [f"{key}={value}" for key, value in make.keywords.items()]
    return name_of(make.func.__name__, *make.args, *named)


def row(make: Callable[[], Work], peaks: dict[str, float], say: Say) -> None:
    report = Report(SILENCE, listener=say)
    try:
        speed = kernel_speed.measure(make(), peaks)
    except torch.cuda.OutOfMemoryError:
        report.row((f"{title(make)} (does not fit this card)", "", "", "", ""))
    else:
        cells = f"{speed.ms:.4f}", f"{speed.floor_ms:.4f}", f"{speed.reached:.0%}", speed.other
        report.row((speed.name, *cells))
    torch.cuda.empty_cache()


def long_prompts(end: float, say: Say) -> None:
    sdpa_rule.report_rule(Report(end - time.monotonic(), listener=say))
