"""State of running requests on the device, one fixed row each; steps upload only changes.

There is one row more than requests can run, and one block more than a pool has: padding rows of a batch read
and write there.

In a pipeline, sampled ids go from the last stage to the rows of the first, overlapping the steps of both:

    last stage    step n │ sample n, ids n ──┐ step n + 1 │ sample n + 1, ids n + 1
    first stage   step n + 1 │ step n + 2    └> rows │ step that continues step n

The first stage waits for ids only before a step that needs their rows, so it can be several steps ahead.

R rows, B blocks of the longest context, S sampling rows of a step.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmbox.kernels.sampling_types import SampleRows

from ..core.request import Request
from ..core.step import ScheduledRequest
from ..device.device import Uploader
from ..distributed.communicator import AsyncWork, TensorParallel
from .device_penalties import DevicePenalties
from .sampler import sampling_numbers


@dataclass(slots=True)
class _Slot:
    """State of one request that was sent to the device."""

    row: int
    admission: int
    blocks: list[int]
    """Uploaded entries of each of its block tables."""
    position: int
    """Position of the token in `last_R`; -1: none."""
    state_slot: int
    """Uploaded slot of recurrent state."""


class DeviceBlockTables:
    """Block tables of one pool for all rows. Blocks freed behind a window stay in them: they are not read."""

    def __init__(self, shape: tuple[int, int], spare_block: int, device: torch.device) -> None:
        self.blocks_RB = torch.full(shape, spare_block, dtype=torch.int32, device=device)
        self._width = shape[1]
        self.forget_changes()

    def stage(self, row: int, table: list[int], known: int) -> int:
        """Stage the entries from `known` on for upload and return how many there are now."""
        if known != len(table):
            first = row * self._width
            self.places.extend(range(first + known, first + len(table)))
            self.added.extend(table[known:])
        return len(table)

    def forget_changes(self) -> None:
        self.places, self.added = array("q"), array("i")


class DeviceRequestState:
    """Device tensors of the request state. Only this class writes them: `stage_update` and `flush` bring
    changes from the host, `store_sampled` stores tokens sampled on the device.
    """

    def __init__(
        self,
        count: int,
        width: int,
        spare_block: int,
        vocab_size: int,
        device: torch.device,
        spare_window_block: int | None = None,
    ) -> None:
        """`count`: requests that can run; `width`: KV blocks of the longest context. `spare_window_block`:
        where sliding-window layers have blocks of their own.
        """
        self.spare = count
        self.last_R = torch.zeros(count + 1, dtype=torch.int64, device=device)
        """Each request's last token, whose KV is not computed yet."""
        size = count + 1, width
        self.tables = DeviceBlockTables(size, spare_block, device)
        self.window_tables = None
        if spare_window_block is not None:
            self.window_tables = DeviceBlockTables(size, spare_window_block, device)
        self._vocab_size = vocab_size
        self._reals_R3 = torch.ones(count + 1, 3, dtype=torch.float64, device=device)
        self._integers_R5 = torch.zeros(count + 1, 5, dtype=torch.int64, device=device)
        """Seed, top k, log-probabilities, the slot of recurrent state (-1 for none, as padding rows have),
        and the difference of a generated token's RoPE position to its place, which images make."""
        self._integers_R5[:, 3] = -1
        self._integers_R5[count, 2] = 1  # rows behind a wrong draft are drawn with it, and read
        self.rules: DevicePenalties | None = None
        """Penalties, where a kernel of the backend applies them; set once, before the first step."""
        self._held: dict[Request, _Slot] = {}
        self._free = list(reversed(range(count)))
        self._forget_changes()

    def stage_update(self, planned: ScheduledRequest) -> int:
        """Return the row of this request and stage its changes for upload."""
        request = planned.request
        held = self._held.get(request)
        if held is None or held.admission != planned.admission:
            held = self._take(planned)
        held.blocks[0] = self.tables.stage(held.row, request.block_table, held.blocks[0])
        if self.window_tables is not None:
            held.blocks[1] = self.window_tables.stage(held.row, request.sliding_table, held.blocks[1])
        if planned.num_tokens == 1 + len(planned.drafts) and held.position != planned.start:
            self._last_rows.append(held.row)
            self._last.append(request.token_ids[planned.start])
        if planned.samples:
            # How many drafts are accepted is not known yet.
            held.position = -1 if planned.drafts else planned.end
            if self.rules is not None:
                self.rules.draws(held.row, planned.end)
        if held.state_slot != request.state_slot:  # went back to the state before a rejected draft
            held.state_slot = request.state_slot
            self._moved_rows.append(held.row)
            self._moved.append(request.state_slot)
        return held.row

    def flush(self, uploader: Uploader) -> None:
        """Upload the staged changes."""
        for tables in (self.tables, self.window_tables):
            if tables is not None and tables.added:
                places, blocks = uploader.upload(tables.places, tables.added)
                tables.blocks_RB.view(-1).index_copy_(0, places, blocks)
        if self._last:
            rows, last = uploader.upload(self._last_rows, self._last)
            self.last_R.index_copy_(0, rows, last)
        if self._moved:
            rows, slots = uploader.upload(self._moved_rows, self._moved)
            self._integers_R5[:, 3].index_copy_(0, rows, slots)
        if self._new_rows:
            rows, reals, integers = uploader.upload(self._new_rows, self._reals, self._integers)
            self._reals_R3.index_copy_(0, rows, reals.view(-1, 3))
            self._integers_R5.index_copy_(0, rows, integers.view(-1, 5))
        if self.rules is not None:
            self.rules.flush(uploader)
        self._forget_changes()

    def take_back(self, request: Request) -> None:
        """Forget the tokens that were sampled for a request and that the host has not taken."""
        held = self._held.get(request)
        if held is not None and held.admission == request.admissions:
            held.position = -1
            if self.rules is not None:
                self.rules.take(held.row, request)

    def store_sampled(self, row_S: Tensor, ids_S: Tensor) -> None:
        self.last_R.index_copy_(0, row_S, ids_S)

    def sampling(self, row_S: Tensor, position_S: Tensor) -> SampleRows:
        temperature_S, top_p_S, min_p_S = self._reals_R3[row_S].unbind(1)
        seed_S, top_k_S, logprobs_S = self._integers_R5[row_S, :3].unbind(1)
        return SampleRows(
            temperature=temperature_S.contiguous(),
            top_k=top_k_S.to(torch.int32),
            top_p=top_p_S.contiguous(),
            min_p=min_p_S.contiguous(),
            seed=seed_S.contiguous(),
            position=position_S,
            logprobs=logprobs_S.to(torch.int32),
        )

    def state_slots(self, row_N: Tensor) -> Tensor:
        return self._integers_R5[:, 3].index_select(0, row_N).to(torch.int32)

    def position_shifts(self, row_N: Tensor) -> Tensor:
        """Return by how much the RoPE position of each sequence's next token is beyond its place."""
        return self._integers_R5[:, 4].index_select(0, row_N)

    def _take(self, planned: ScheduledRequest) -> _Slot:
        request = planned.request
        if (old := self._held.pop(request, None)) is not None:
            self._free.append(old.row)
        if not self._free:
            self._sweep()
        slot = request.state_slot
        held = self._held[request] = _Slot(self._free.pop(), planned.admission, [0, 0], -1, slot)
        self._new_rows.append(held.row)
        reals, integers = sampling_numbers(request.params, self._vocab_size)
        self._reals.extend(reals)
        self._integers.extend((*integers, slot, request.position_shift))
        if self.rules is not None:
            self.rules.take(held.row, request)
        return held

    def _sweep(self) -> None:
        """Free the rows of finished requests: this class is not notified when a request leaves."""
        gone = [request for request, held in self._held.items() if request.admissions != held.admission]
        assert gone, "more requests run than there are rows"
        self._free += [self._held.pop(request).row for request in gone]

    def _forget_changes(self) -> None:
        self.tables.forget_changes()
        if self.window_tables is not None:
            self.window_tables.forget_changes()
        self._last_rows, self._last = array("q"), array("q")
        self._moved_rows, self._moved = array("q"), array("q")
        self._new_rows, self._reals, self._integers = array("q"), array("d"), array("q")


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
