"""Probabilities as integers, so that sums over the vocabulary do not depend on their order.

Legend: R rows, V vocabulary, K candidates.
"""

import math

import torch
from torch import Tensor

SCALE_BITS = 40
ONE = 1 << SCALE_BITS
"""Weight of the most likely token. 2^18 ids of that weight still sum far below 2^63."""

_SMALLEST = -50.0
# exp(-50) is below half a unit already; going lower would only produce denormals, which are slow.


def weights(logits: Tensor, best_R1: Tensor, temperature_R: Tensor) -> Tensor:
    """floor(2^40 · exp((logit - best) / temperature)) as int64; float32 logits, best is each row's largest.

    A token less likely than 2^-40 of the best one gets 0: it is never drawn, and what all of those
    together would have had is below 2^-40 · V, 2e-7 for the largest vocabularies.
    """
    scaled = (logits - best_R1).div_(temperature_R.float()[:, None])
    return scaled.clamp_(min=_SMALLEST).exp_().mul_(float(ONE)).to(torch.int64)


def log_total(best: float, total: int) -> float:
    """log(sum(exp(logits))) of a row from its largest logit and the sum of its weights at temperature 1."""
    return best + math.log(total / ONE)
