"""One vector of a whole text: the mean of final states of some of its rows.

States are summed as integers, in units of `UNIT`. Then a sum does not depend on its order: a text has the
same vector alone and in a batch, in one step and in chunks. The unit is far below what float32 keeps of a
vector of length 1.

P rows of a step that are pooled, K requests that they are of, E hidden.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..core.outputs import UNIT
from ..core.request import Request
from ..core.step import ScheduledRequest

_BOUND: Final = 2.0**16
"""No state of a sound model is as large. A step of 2^17 rows below it has room in the sum."""
_AT_ONCE: Final = 256
"""Rows that are made integers together, which takes memory."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Neighbouring rows of one request."""

    request: Request
    count: int


def pooled_rows(row: ScheduledRequest) -> range:
    """Of this step's rows, counted from `row.start`, those that the request's vector is made of."""
    match row.request.params.pooling:
        case "mean":
            return range(row.num_tokens)
        case "last" if row.end == row.request.num_tokens:
            return range(row.num_tokens - 1, row.num_tokens)
        case "cls" if row.start == 0:
            return range(1)
        case _:
            return range(0)


def sum_states(hidden_PE: Tensor, pooled: Sequence[PooledRows]) -> Tensor:
    """[K, E + 1] int64, on the device: sums in units, and how many numbers were none, or far too large."""
    sums = []
    for states_E in torch.split(hidden_PE, [rows.count for rows in pooled]):
        parts = torch.split(states_E, _AT_ONCE)
        sums.append(torch.stack([_sum(part) for part in parts]).sum(0))
    return torch.stack(sums)


def _sum(states_PE: Tensor) -> Tensor:
    wide_PE = states_PE.double()
    sound_PE = wide_PE.abs() < _BOUND
    units_PE = torch.where(sound_PE, wide_PE / UNIT, 0.0).round().long()
    return torch.cat((units_PE.sum(0), (~sound_PE).sum().view(1)))


def read_sums(
    sums_KE: Tensor, pooled: Sequence[PooledRows]
) -> tuple[dict[str, "array[int]"], dict[str, str]]:
    """Of `sum_states`, on the host: sums by request, and what is wrong with those that have none."""
    sums: dict[str, array[int]] = {}
    failed: dict[str, str] = {}
    for rows, (*units, wrong) in zip(pooled, sums_KE.tolist(), strict=True):
        if wrong:
            failed[rows.request.request_id] = (
                f"{wrong} of the model's states are no numbers (NaN or infinite): its weights may "
                "be damaged, or its numbers too large for the format"
            )
        else:
            sums[rows.request.request_id] = array("q", units)
    return sums, failed
