"""Top-p over the whole vocabulary without sorting it, for flat distributions on a CPU.

Tokens fall into bins by likelihood; only two bins need their order known: the one where the nucleus ends and
the one that the drawn point falls into. Same answer as a full sort, at a tenth of its cost.

Legend: V vocabulary, B bins, K ids of one bin.
"""

import torch
from torch import Tensor

from .draw import Drawn, Knobs, weights_above

_BINS = 2048
_DEEPEST = -28.0
# Beyond it a weight is 0 (2^-40 = e^-27.7), so all of the rest may share the last bin.


def draw_binned(logits_RV: Tensor, knobs: Knobs) -> Drawn:
    """What `draw_ranked` would draw if it ranked the whole vocabulary. For rows without top-k."""
    best_R1 = logits_RV.amax(-1, keepdim=True)
    weight_RV = weights_above(logits_RV, best_R1, knobs)
    ids = [
        _draw_row(logits_V, weight_V, _bins(logits_V - best, temperature), top_p, noise)
        for logits_V, weight_V, best, temperature, top_p, noise in zip(
            logits_RV,
            weight_RV,
            best_R1,
            knobs.temperature.tolist(),
            knobs.top_p.tolist(),
            knobs.noise.tolist(),
            strict=True,
        )
    ]
    id_R = torch.tensor(ids, device=logits_RV.device)
    return Drawn(id_R, best_R1[:, 0], torch.ones_like(id_R, dtype=torch.bool))


def _bins(below_best_V: Tensor, temperature: float) -> Tensor:
    """Bin of each id: every id of a bin is likelier than any of the next, equal logits share one."""
    depth_V = (below_best_V / temperature).clamp_(min=_DEEPEST)
    return depth_V.mul_((_BINS - 1) / _DEEPEST).to(torch.int64)


def _draw_row(logits_V: Tensor, weight_V: Tensor, bin_V: Tensor, top_p: float, noise: float) -> int:
    until_B = weight_V.new_zeros(_BINS).scatter_add_(0, bin_V, weight_V).cumsum(0)
    limit = top_p * float(until_B[-1])
    edge = int((until_B.double() < limit).sum())
    before = _mass_before(until_B, edge)
    _, weight_K = _ranked_bin(logits_V, weight_V, bin_V, edge)
    before_K = before + weight_K.cumsum(0) - weight_K
    kept = before + int(weight_K[before_K.double() < limit].sum())

    point = min(int(noise * kept), kept - 1)
    place = int(torch.searchsorted(until_B, point, right=True))
    id_K, weight_K = _ranked_bin(logits_V, weight_V, bin_V, place)
    into = point - _mass_before(until_B, place)
    return int(id_K[torch.searchsorted(weight_K.cumsum(0), into, right=True)])


def _mass_before(until_B: Tensor, index: int) -> int:
    return int(until_B[index - 1]) if index else 0


def _ranked_bin(logits_V: Tensor, weight_V: Tensor, bin_V: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Ids of one bin and their weights, best first, equal logits by lowest id."""
    id_K = (bin_V == index).nonzero()[:, 0]
    id_K = id_K[torch.sort(logits_V[id_K], descending=True, stable=True).indices]
    return id_K, weight_V[id_K]
