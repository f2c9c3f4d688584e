"""Drawn ids on their way from the last stage to the first, beside whatever both do meanwhile.

    last stage    step n │ draw n, ids n ──┐ step n + 1 │ draw n + 1, ids n + 1
    first stage   step n + 1 │ step n + 2  └> rows │ step that goes on from step n

The first stage waits for ids only before a step that needs the rows they belong to; so it may be steps ahead.
S rows of a step that sample.
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
    """Of the same rows, on the host."""


class SampledTokenFeedback:
    def __init__(self, rank: TensorParallel, rows: DeviceRequestState, depth: int) -> None:
        """`depth`: steps that may be launched before an older one is done."""
        self._rank = rank
        self._rows = rows
        self._depth = depth
        self._expected: deque[_Expected] = deque()
        """On the first stage, in the order of steps."""
        self._sent: deque[tuple[AsyncWork, Tensor]] = deque()
        """On the last: tensors that must stay as they are."""

    def send(self, ids_S: Tensor) -> None:
        self._sent.append((self._rank.collective.hand_back(ids_S), ids_S))
        if len(self._sent) > self._depth:
            self._sent.popleft()[0].wait()

    def expect(self, row_S: Tensor, numbers: Iterable[int]) -> None:
        """`numbers`: those of `row_S`, which may change once this returns."""
        ids_S = torch.empty_like(row_S, memory_format=torch.contiguous_format)
        way = self._rank.collective.hand_back(ids_S)
        self._expected.append(_Expected(way, ids_S, row_S.clone(), frozenset(numbers)))

    def settle(self, numbers: Iterable[int]) -> None:
        """Before a step of these rows, and before the host writes to them: a row may have a new owner, which
        what is on its way to the old one must not reach.
        """
        wanted = set(numbers)
        needed = [
            place for place, each in enumerate(self._expected, 1) if not wanted.isdisjoint(each.numbers)
        ]
        for _ in range(max(max(needed, default=0), len(self._expected) - self._depth)):
            way, ids_S, row_S, _ = self._expected.popleft()
            way.wait()
            self._rows.keep_drawn(row_S, ids_S)
