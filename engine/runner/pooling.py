"""Pooling for embeddings: one vector per text, the mean of the final hidden states of some of its rows.

States are summed as integers, in units of `UNIT`. So the sum does not depend on its order: a text has the
same vector alone and in a batch, in one step and in chunks. The unit is far below float32's resolution of a
vector of length 1.

P pooled rows of a step, K requests, E hidden.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..core.request import Request
from ..core.step import UNIT, ScheduledRequest

_BOUND: Final = 2.0**16
"""Upper bound of hidden states, above those of any sound model. The int64 sum holds 2^17 rows below it."""
_AT_ONCE: Final = 256
"""Rows converted to integers at once, to bound memory."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Contiguous pooled rows of one request."""

    request: Request
    count: int


def pooled_rows(row: ScheduledRequest) -> range:
    """Return the rows of this step that are pooled, counted from `row.start`."""
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
    """Sum hidden states per request, on the device: int64 [K, E + 1], in units; the last column counts NaN,
    infinite and too large states.
    """
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
    """Read a result of `sum_states` on the host: sums by request id, and errors by request id."""
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
