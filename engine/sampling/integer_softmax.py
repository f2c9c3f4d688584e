"""Unnormalized softmax in integers ("weights"): sums over the vocabulary do not depend on their order.

R rows, V vocabulary, K candidates.
"""

import math

import torch
from torch import Tensor

SCALE_BITS = 40
ONE = 1 << SCALE_BITS
"""Weight of the most likely token. The sum of 2^18 such weights is far below 2^63."""

_SMALLEST = -50.0
# exp(-50) is below half a unit; lower values would only produce denormals, which are slow.


def weights(logits: Tensor, best_R1: Tensor, temperature_R: Tensor) -> Tensor:
    """Compute floor(2^40 · exp((logit - best) / temperature)) as int64, in the shape of the float32 logits.

    `best_R1`: each row's largest logit. A token less likely than 2^-40 of the best one gets 0 and is never
    sampled; the probability of all those together is below 2^-40 · V, 2e-7 for the largest vocabularies.
    """
    scaled = (logits - best_R1).div_(temperature_R.float()[:, None])
    return scaled.clamp_(min=_SMALLEST).exp_().mul_(float(ONE)).to(torch.int64)


def log_total(best: float, total: int) -> float:
    """Return log(sum(exp(logits))) from a row's largest logit and its sum of weights at temperature 1."""
    return best + math.log(total / ONE)
