"""Draft heads at work: they follow the target step by step and propose tokens from its hidden states.

After each step the head is shown the hidden states of the step's rows, which stay on the device. Rows of
prompts are computed at once, those of answers when drafts are wanted, at the latest when they fill a block:
so the head's keys and values lie in the blocks of the requests' block tables, in a separate KV cache, and
are copied, cached and kept on disk with the target's.

A head's pass has rows of tokens as a draft model's has. A row also goes on from the hidden state of the token
before its own, and its keys lie in the slot of that one. In the last slot of a block that several requests
share it is of the token that followed in the first of them: drafts may be worse by that, tokens are not.

T rows of a pass, S of them to sample, F numbers of a feature, E hidden.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llmbox.kernels.ops import KVCache

from ..config import DRAFT_MODEL_ROWS
from ..core.request import Request
from ..core.speculation.proposer import DraftMethod, Proposals
from ..core.step import ProfiledRunner, SampledToken, ScheduledRequest, StepPlan, StepResult
from ..device.device import Device, to_device
from ..model.draft_heads import DraftHead, MedusaHeads
from ..model.forward_context import ForwardContext
from ..model.rotary import Rotary
from .block_memory import ModelCaches
from .cuda_graphs import CudaCapture
from .draft_model import DraftExecutor, DraftSampler, ModelProposer, SyncDraftExecutor
from .gpu_inputs import DeviceSizes
from .gpu_runner import GPUModelRunner
from .input_batch import begun_blocks, ragged, rope_rows
from .prompt_results import LaunchedStep


class HeadExecutor(DraftExecutor, Protocol):
    """Executor of a draft head. The rows of a launch go on from what it was fed, or else from the results of
    the launch before, which sampled a token for each of their requests.
    """

    def feed(self, features_TF: Tensor) -> None:
        """Set the target's hidden states for the rows of the next launch."""
        ...


@dataclass(slots=True)
class FollowedRequest:
    """Progress of a head in a request."""

    admission: int
    """Value of `Request.admissions` that this belongs to."""
    computed: int
    """Number of the target's rows that the head has gone on from, or passed over."""
    waiting: list[Tensor] = field(default_factory=list)
    """Features of the rows from there on, [rows, F] each."""
    num_waiting: int = 0
    last_1F: Tensor | None = None
    """Features of the row before `computed`."""

    @property
    def end(self) -> int:
        return self.computed + self.num_waiting


class HeadProposer(ModelProposer):
    """Proposer of a draft head, which is shown the hidden states of each step."""

    executor: HeadExecutor

    def __init__(self, method: DraftMethod, head: DraftHead, executor: HeadExecutor, block_size: int) -> None:
        super().__init__(executor)
        self.method, self.head = method, head
        self._block_size = block_size
        self._followed: WeakKeyDictionary[Request, FollowedRequest] = WeakKeyDictionary()

    @torch.inference_mode()
    def observe(self, rows: Sequence[ScheduledRequest], features_TF: Tensor, result: StepResult) -> None:
        """Take the features of a step's rows, in their order, before `result` is applied to the requests.
        They must not be written to any more.
        """
        ready, parts, first = list[ScheduledRequest](), list[Tensor](), 0
        is_large = any(row.num_tokens > 1 + len(row.drafts) for row in rows)
        for row in rows:
            request, begin = row.request, first
            first += row.num_tokens
            if row.admission != request.admissions:  # ended or preempted since it was launched
                continue
            if request.request_id in result.failed:
                self._followed.pop(request, None)
                continue
            taken = [each.token_id for each in result.tokens_of(row)]
            count = row.num_tokens - row.num_rejected(len(taken))
            followed, end_TF = self._follow(row), features_TF[begin : begin + count]
            if not self.head.has_keys:  # the last row alone counts
                followed.computed, end_TF, count = followed.end + count - 1, end_TF[-1:], 1
                followed.waiting, followed.num_waiting = [], 0
            followed.waiting.append(end_TF)
            followed.num_waiting += count
            if self.head.has_keys and self._is_due(row, followed):
                if followed.end == request.num_tokens + len(taken):
                    taken.append(request.token_ids[-1])  # nothing follows the last token of a text to embed
                ready.append(self._take(request, followed, parts, taken))
            elif is_large:  # a view keeps the whole of it
                followed.waiting[-1] = end_TF.clone()
        if ready:
            self.executor.feed(torch.cat(parts))
            self.executor.launch(StepPlan(rows=ready))

    def _follow(self, row: ScheduledRequest) -> FollowedRequest:
        """Return the state of the row's request; a new one where rows before it were not seen."""
        found = self._followed.get(row.request)
        if found is None or found.admission != row.request.admissions or found.end != row.start:
            found = self._followed[row.request] = FollowedRequest(row.request.admissions, row.start)
        return found

    def _is_due(self, row: ScheduledRequest, followed: FollowedRequest) -> bool:
        """Return True if waiting rows are to be computed: those of prompts, or of a block that is full."""
        is_long = row.start < row.request.num_prompt or row.num_tokens > 1 + len(row.drafts)
        return is_long or followed.end // self._block_size > followed.computed // self._block_size

    def _take(
        self,
        request: Request,
        followed: FollowedRequest,
        parts: list[Tensor],
        more: Sequence[int] = (),
        *,
        samples: bool = False,
    ) -> ScheduledRequest:
        """Return a row of a pass that computes the waiting rows of a request, whose features are added to
        `parts`. `more`: tokens after those that it has.
        """
        if not followed.waiting:  # the last one again, for its result
            assert followed.last_1F is not None
            followed.waiting, followed.num_waiting = [followed.last_1F], 1
            followed.computed -= 1
        parts += followed.waiting
        last_1F, start, count = followed.waiting[-1][-1:], followed.computed + 1, followed.num_waiting
        followed.last_1F = last_1F if samples else last_1F.clone()  # of a prompt, perhaps
        followed.computed, followed.waiting, followed.num_waiting = followed.end, [], 0
        return ScheduledRequest(request, start, count, samples, request.admissions, more)

    @torch.inference_mode()
    def _catch_up(self, wanted: Sequence[tuple[Request, int]]) -> list[ScheduledRequest]:
        rows, parts = list[ScheduledRequest](), list[Tensor]()
        for request, _ in wanted:
            followed = self._followed.get(request)
            is_current = followed is not None and followed.admission == request.admissions
            if followed is not None and is_current and followed.end == request.num_tokens - 1:
                rows.append(self._take(request, followed, parts, samples=True))
        if rows:
            self.executor.feed(torch.cat(parts))
        return rows

    def _note_computed(self, row: ScheduledRequest, known: int) -> None:
        """Do nothing: what drafts leave in the cache is overwritten."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        if isinstance(self.head, MedusaHeads):
            most = len(self.head.heads)
            wanted = [(request, min(count, most)) for request, count in wanted]
        return super().propose(wanted)


class HiddenStates:
    """Input hidden states of the rows of a head's next pass."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._fed_TF: Tensor | None = None
        self._places: dict[Request, int] = {}
        self._left_SE: Tensor | None = None
        """Results of the last pass, of the requests in `_places`."""

    def feed(self, features_TF: Tensor) -> None:
        self._fed_TF = features_TF

    def take(self, rows: Sequence[ScheduledRequest]) -> Tensor:
        """Return the input hidden states of these rows, [T, E]."""
        fed_TF, self._fed_TF = self._fed_TF, None
        if fed_TF is not None:
            return self._head.enter(fed_TF)
        assert self._left_SE is not None
        if len(rows) == len(self._places):
            return self._left_SE
        places = array("q", [self._places[row.request] for row in rows])
        return self._left_SE.index_select(0, to_device(places, self._left_SE.device))

    def leave(self, rows: Sequence[ScheduledRequest], hidden_SE: Tensor) -> None:
        """Keep the hidden states of the rows that sample, for the next pass."""
        self._places = {row.request: place for place, row in enumerate(row for row in rows if row.samples)}
        self._left_SE = hidden_SE


def _last_places(rows: Sequence[ScheduledRequest]) -> "array[int]":
    """Return the places of the rows that sample, each the last one of its request."""
    ends = accumulate(row.num_tokens for row in rows)
    return array("q", [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples])


class HeadRunner:
    """`ModelRunner` of a draft head on a CPU."""

    def __init__(
        self, head: DraftHead, rotary: Rotary, cache: KVCache, sampler: DraftSampler, block_size: int
    ) -> None:
        """`cache`: with as many blocks as the target's."""
        self._head, self._rotary, self._cache = head, rotary, cache
        self._sampler, self._block_size = sampler, block_size
        self.hidden = HiddenStates(head)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the rows, `DRAFT_MODEL_ROWS` at a time."""
        hidden_TE, left, normed, first = self.hidden.take(plan.rows), list[Tensor](), list[Tensor](), 0
        for part in _parts(plan.rows):
            end = first + sum(row.num_tokens for row in part)
            results, first = self._run(part, hidden_TE[first:end]), end
            last_S = to_device(_last_places(part), hidden_TE.device)
            left.append(results[0].index_select(0, last_S))
            normed.append(results[1].index_select(0, last_S))
        self.hidden.leave(plan.rows, torch.cat(left))
        requests = [row.request for row in plan.rows if row.samples]
        result = StepResult()
        if requests:
            picks = self._sampler.sample(self._head.logits(torch.cat(normed)), requests)
            for request, pick in zip(requests, picks, strict=True):
                if isinstance(pick, SampledToken):
                    result.tokens[request.request_id] = pick
        return result

    def profiled(self) -> ProfiledRunner:
        return ProfiledRunner(
            ops=self._head.ops, forward=self._head.__call__, sampling=(self._sampler.sample,)
        )

    def _run(self, rows: Sequence[ScheduledRequest], hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        slots, ids = [_slots_of(row) for row in rows], array("q")
        positions, starts = array("i"), array("i", [0])
        for row, slot in zip(rows, slots, strict=True):
            ids.extend(row.request.token_ids[row.start : row.end])
            ids.extend(row.drafts)
            positions.extend(range(slot.start, slot.end))
            starts.append(starts[-1] + row.num_tokens)
        ops, device = self._head.ops, hidden_TE.device
        layout = ragged(slots, starts, positions, self._block_size, device)
        plans = dict[int | None, Any]()
        if self._head.has_keys:
            ops.clear_blocks(self._cache, begun_blocks(slots, self._block_size))
            plans = {None: ops.plan_attention(layout, self._cache, None)}
        rope = rope_rows(self._rotary, slots, layout.positions_T)
        return self._head(
            hidden_TE, ForwardContext(to_device(ids, device), *rope, self._cache, plans, layout=layout)
        )


class SyncHeadExecutor(SyncDraftExecutor):
    """Executor of a draft head on a CPU."""

    runner: HeadRunner

    def feed(self, features_TF: Tensor) -> None:
        self.runner.hidden.feed(features_TF)


class DeviceHeadRunner(GPUModelRunner):
    """Runner of a draft head on a GPU. A pass of few rows is a graph: each row is a sequence of its own with
    the blocks of its request, as a draft is in a step of the target.
    """

    lag = 1
    unread = 1  # passes that follow the two steps that the target has in flight, and two of a draft

    def __init__(
        self,
        head: DraftHead,
        rotary: Rotary,
        caches: ModelCaches,
        device: Device,
        sizes: DeviceSizes,
        capture: CudaCapture | None = None,
        graphs_bytes: int = 0,
    ) -> None:
        """`capture`: as of `GPUModelRunner`. Medusa heads have no graph: each pass is another head's."""
        if not head.has_keys:
            capture = None
        super().__init__(head, rotary, caches, device, sizes, capture, graphs_bytes)
        self.head, self._states_of = head, HiddenStates(head)
        if not head.has_keys:
            self._windows = set()
        shape = 2, *self._hidden_RE.shape
        self._fixed_2RE = torch.zeros(shape, dtype=head.dtype, device=device.torch_device)
        """Hidden states that a decoding pass goes on from, and those it leaves: places that graphs know."""
        self._entering_TE = self._left_SE = self._fixed_2RE[0]

    def feed(self, features_TF: Tensor) -> None:
        self._states_of.feed(features_TF)

    def feed_zeros(self, rows: int) -> None:
        """Feed zeros as hidden states, for a trial step of a load."""
        self.feed(self._fixed_2RE.new_zeros(rows, self.head.features))

    def follow(self, target: GPUModelRunner, method: DraftMethod, taps: Sequence[int] = ()) -> None:
        """Create the proposer of this head and attach it to the steps of its target."""
        proposer = HeadProposer(method, self.head, self, self._sizes.block_size)
        target.proposers.append(proposer)
        target.attach(proposer, self.caches.kv, taps)

    def _is_decoding(self, plan: StepPlan) -> bool:
        return plan.num_tokens <= self._sizes.rows

    def _prepare_blocks(self, plan: StepPlan) -> None:
        """Clear the blocks that a pass begins; the target's steps copy them with its own."""
        if self.head.has_keys:
            slots = [_slots_of(row) for row in plan.rows]
            self._ops.clear_blocks(self.caches.kv, begun_blocks(slots, self._sizes.block_size))

    def _launch_decoding(self, plan: StepPlan, numbers: Sequence[int], size: int) -> LaunchedStep:
        count = plan.num_tokens
        self._fixed_2RE[0, :count].copy_(self._states_of.take(plan.rows))
        self._run_decoding(plan, numbers, size)
        places = _last_places(plan.rows)
        if not places:
            return LaunchedStep(self._device.record(), None, None)
        normed_SE, left_SE = self._hidden_RE[:count], self._fixed_2RE[1, :count]
        row_S, length_S = self._decoding_of(size)[:2, :count]
        if len(places) == count and (drawn := self._draw_by_graph(plan, size)) is not None:
            self._states_of.leave(plan.rows, left_SE)
            return drawn
        if len(places) < count:
            (place_S,) = self._uploader.upload(places)
            normed_SE, left_SE = normed_SE.index_select(0, place_S), left_SE.index_select(0, place_S)
            row_S, length_S = row_S.index_select(0, place_S), length_S.index_select(0, place_S)
        self._states_of.leave(plan.rows, left_SE)
        return self._finish(normed_SE, plan.rows, numbers, row_S, length_S + self.lag)

    def _launch_mixed(self, plan: StepPlan, numbers: Sequence[int]) -> LaunchedStep:
        self._entering_TE = self._states_of.take(plan.rows)
        launched = super()._launch_mixed(plan, numbers)
        self._states_of.leave(plan.rows, self._left_SE)
        return launched

    def _hidden(self, forward: ForwardContext, rows_R: Tensor | None) -> Tensor:
        if rows_R is not None:
            left_TE, normed_TE = self.head(self._entering_TE, forward)
            self._left_SE = left_TE.index_select(0, rows_R)
            return normed_TE.index_select(0, rows_R)
        count = len(forward.ids_T)
        left_TE, normed_TE = self.head(self._fixed_2RE[0, :count], forward)
        self._fixed_2RE[1, :count].copy_(left_TE)
        return normed_TE


def _slots_of(row: ScheduledRequest) -> ScheduledRequest:
    """Return the row moved back by one position: a head keeps the keys of a token in the slot of the token
    before it.
    """
    return replace(row, start=row.start - 1)


def _parts(rows: Sequence[ScheduledRequest]) -> Iterator[list[ScheduledRequest]]:
    """Yield the rows of one pass after another."""
    part, room = list[ScheduledRequest](), DRAFT_MODEL_ROWS
    for row in rows:
        start, known = row.start, row.end - len(row.drafts)
        while start < row.end:
            if not room:
                yield part
                part, room = [], DRAFT_MODEL_ROWS
            count = min(room, row.end - start)
            end = start + count
            drafts = row.drafts[max(0, start - known) : max(0, end - known)]
            samples = row.samples and end == row.end
            part.append(replace(row, start=start, num_tokens=count, samples=samples, drafts=drafts))
            start, room = end, room - count
    yield part
