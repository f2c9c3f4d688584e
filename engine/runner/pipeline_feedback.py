"""Feedback of sampled ids from the last pipeline stage to the first, overlapping the steps of both.

    last stage    step n │ sample n, ids n ──┐ step n + 1 │ sample n + 1, ids n + 1
    first stage   step n + 1 │ step n + 2    └> rows │ step that continues step n

The first stage waits for ids only before a step that needs their rows, so it can be several steps ahead.
S sampling rows of a step.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed.communicator import AsyncWork, TensorParallel
from ..sampling.device_state import DeviceRequestState


class _Expected(NamedTuple):
    way: AsyncWork
    ids_S: Tensor
    row_S: Tensor
    numbers: frozenset[int]
    """State rows of `row_S`, known on the host."""


class SampledTokenFeedback:
    """Transfers of sampled ids in flight: sends on the last stage, receives on the first."""

    def __init__(self, rank: TensorParallel, rows: DeviceRequestState, depth: int) -> None:
        """`depth`: most steps in flight."""
        self._rank = rank
        self._rows = rows
        self._depth = depth
        self._expected: deque[_Expected] = deque()
        """Receives of the first stage, in the order of steps."""
        self._sent: deque[tuple[AsyncWork, Tensor]] = deque()
        """Sends of the last stage, with the tensors that must stay untouched."""

    def send(self, ids_S: Tensor) -> None:
        self._sent.append((self._rank.communicator.transfer_to_first_stage(ids_S), ids_S))
        if len(self._sent) > self._depth:
            self._sent.popleft()[0].wait()

    def post_receive(self, row_S: Tensor, numbers: Iterable[int]) -> None:
        """Post the receive of one step's ids. `numbers`: state rows of `row_S`; it may change afterwards."""
        ids_S = torch.empty_like(row_S, memory_format=torch.contiguous_format)
        way = self._rank.communicator.transfer_to_first_stage(ids_S)
        self._expected.append(_Expected(way, ids_S, row_S.clone(), frozenset(numbers)))

    def wait_for_rows(self, numbers: Iterable[int]) -> None:
        """Wait for pending ids of these rows and store them.

        Called before a step of these rows and before the host writes to them: a row may have a new owner,
        which must not get the previous owner's ids.
        """
        wanted = set(numbers)
        needed = [
            place for place, each in enumerate(self._expected, 1) if not wanted.isdisjoint(each.numbers)
        ]
        for _ in range(max(max(needed, default=0), len(self._expected) - self._depth)):
            way, ids_S, row_S, _ = self._expected.popleft()
            way.wait()
            self._rows.store_sampled(row_S, ids_S)
