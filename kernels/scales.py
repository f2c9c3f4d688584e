"""Scales of integer weights without steps, in plain torch. In C++: `cpu/native/quant_round.h`."""

import torch
from torch import Tensor

TRIED = range(-5, 6)
"""The largest weight at -8 - 0.2 · each."""


def int8_scale(x: Tensor) -> Tensor:
    """[..., group] -> [...]: the largest weight at 127."""
    return x.abs().amax(-1) / 127


def best_int4_scale(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """[..., group] -> [...]. The largest weight at the end of the range is the start.

    Eleven scales around it are tried, each with its least-squares correction. The smallest error
    wins, weighted by |x| + the group's root mean square, and by the importance of its input where known.
    """
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best, best_gain = extreme / -8, torch.zeros_like(extreme)
    counts = x.abs() + x.square().mean(-1, keepdim=True).sqrt()
    if importance is not None:
        counts = counts * importance
    for step in TRIED:
        inverse = torch.where(extreme == 0, 0, -(8 + 0.2 * step) / extreme).unsqueeze(-1)
        code = (x * inverse).round_().clamp_(-8, 7)
        cross, square = (counts * x * code).sum(-1), (counts * code * code).sum(-1)
        gain = torch.where(square > 0, cross * cross / square, 0)
        better = gain > best_gain
        best = torch.where(better, cross / square, best)
        best_gain = torch.where(better, gain, best_gain)
    return best
