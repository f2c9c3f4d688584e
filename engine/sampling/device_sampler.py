"""Asynchronous sampler for GPUs: sampled ids stay on the device, a copy goes to the host.

S sampling rows, M of those that this rank samples, V vocabulary, C columns of numbers (see `sampler.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops
from llmbox.kernels.reference.sampling import likeliest, rank_tokens
from llmbox.kernels.sampling_types import CandidateRanks, PenaltyState, Sampled

from ..core.request import Request
from ..core.step import SampledToken, ScheduledRequest
from ..device.device import move
from ..distributed.communicator import SINGLE, TensorParallel
from .device_penalties import DevicePenalties
from .device_state import DeviceRequestState
from .logits_processors import FORBIDDEN, LogitsProcessorCache, mask_bits, pad_vocabulary
from .sampler import LogprobsRequest, rank_columns, read_samples, sample_by_reference

_MASKED_AT_ONCE = 16
"""Rows: bounds what masks and copies of logits take."""


@dataclass(frozen=True, slots=True)
class DeviceSamplerOutput:
    """Sampled ids, and float64 numbers [S, C] from which tokens and log-probabilities are built."""

    numbers_SC: Tensor
    ids_S: Tensor
    requests: list[Request]
    top: int

    @classmethod
    def of_plain(cls, numbers_S3: Tensor, requests: list[Request]) -> "DeviceSamplerOutput":
        """Return the output of rows that `draws_plainly` is true of."""
        return cls(numbers_S3, numbers_S3[:, 0], requests, 0)

    def read(self, rows: Sequence[Sequence[float]]) -> list[SampledToken | str]:
        """Build the token or the error of each row, from `numbers_SC` on the host."""
        return read_samples(rows, self.requests, self.top)


def draws_plainly(row: ScheduledRequest) -> bool:
    """Return True if a row needs nothing to be sampled but its logits and its row of the request state, so
    that a graph can do it: no logits processor, grammar or log-probabilities.
    """
    request = row.request
    is_free = request.mask is None and not any(row.draft_masks)
    return is_free and not request.edits_logits and request.params.logprobs is None


class DeviceSampler:
    """Samples with the backend's kernel, or in plain torch. All ranks of a stage get the same ids."""

    def __init__(
        self, ops: Ops, rows: DeviceRequestState, vocab_size: int, rank: TensorParallel = SINGLE
    ) -> None:
        self._ops = ops
        self._rows = rows
        self._vocab_size = vocab_size
        self._rank = rank
        self._rules = LogitsProcessorCache(vocab_size)
        if ops.sample is not None and rank.layout.is_last:
            rows.rules = DevicePenalties(rows.spare + 1, vocab_size, rows.last_R.device)

    def draw(
        self, logits_SV: Tensor, requests: list[Request], row_S: Tensor, position_S: Tensor
    ) -> DeviceSamplerOutput:
        """Sample, and store the tokens in the request state.

        Logit columns beyond the vocabulary are padding; ids beyond the logits are not sampled.
        """
        wanted = LogprobsRequest.of(requests, self._vocab_size)
        numbers_SC = self._draw_numbers(logits_SV, requests, row_S, position_S, wanted)
        return DeviceSamplerOutput(numbers_SC, numbers_SC[:, 0].long(), requests, wanted.top)

    def draw_plain(self, logits_SV: Tensor, row_S: Tensor, position_S: Tensor) -> Tensor:
        """Do what `draw` does for rows that `draws_plainly` is true of, from device tensors alone. Returns
        float64 [S, 3].
        """
        return self._draw_numbers(logits_SV, [], row_S, position_S, LogprobsRequest(False, 0))

    def draw_verified(
        self, logits_SV: Tensor, planned: Sequence[ScheduledRequest], row_S: Tensor, position_S: Tensor
    ) -> DeviceSamplerOutput:
        """Sample all rows of requests with drafts, each as a step of its own would where the drafts before it
        are right; results of other rows mean nothing.

        A draw depends on (seed, position) and its row of logits, so that all rows are drawn at once. But
        penalties, bad words and grammars read the tokens before: rows of such requests are drawn one after
        another, and the first wrong draft ends what the device counts.
        """
        requests = [row.request for row in planned for _ in range(1 + len(row.drafts))]
        wanted = LogprobsRequest.of(requests, self._vocab_size)
        first, chains, place = list[int](), list[tuple[int, ScheduledRequest]](), 0
        for row in planned:
            count = 1 + len(row.drafts)
            limited = row.request.mask is not None or any(row.draft_masks)
            if row.drafts and (limited or row.request.edits_logits):
                chains.append((place, row))
                first.append(place)
            else:
                first.extend(range(place, place + count))
            place += count
        if not chains:
            return self.draw(logits_SV, requests, row_S, position_S)
        device = logits_SV.device
        numbers_SC = torch.empty(len(requests), wanted.columns, dtype=torch.float64, device=device)

        def draw(place_M: Tensor, drawn: list[Request], row_M: Tensor) -> None:
            logits_MV, position_M = logits_SV.index_select(0, place_M), position_S.index_select(0, place_M)
            numbers_MC = self._draw_numbers(logits_MV, drawn, row_M, position_M, wanted)
            numbers_SC.index_copy_(0, place_M, numbers_MC)

        first_M = move(torch.tensor(first), device)
        draw(first_M, [requests[place] for place in first], row_S.index_select(0, first_M))
        chains.sort(key=lambda chain: -len(chain[1].drafts))
        place_G = move(torch.tensor([place for place, _ in chains]), device)
        row_G = row_S.index_select(0, place_G)
        for depth in range(len(chains[0][1].drafts)):
            going = [row for _, row in chains if len(row.drafts) > depth]
            place_G, row_G = place_G[: len(going)], row_G[: len(going)]
            draft_G = move(torch.tensor([row.drafts[depth] for row in going]), device)
            is_right_G = numbers_SC[:, 0].index_select(0, place_G) == draft_G
            row_G = row_G.masked_fill(~is_right_G, self._rows.spare)
            place_G = place_G + 1
            with _assuming_drafts(going, depth + 1):
                draw(place_G, [row.request for row in going], row_G)
        self._rules.forget([row.request for _, row in chains])
        return DeviceSamplerOutput(numbers_SC, numbers_SC[:, 0].long(), requests, wanted.top)

    def take_back(self, requests: Sequence[Request]) -> None:
        """Forget the tokens that were sampled for these requests and that the host has not taken."""
        self._rules.forget(requests)
        for request in requests:
            self._rows.take_back(request)

    def _draw_numbers(
        self,
        logits_SV: Tensor,
        requests: Sequence[Request],
        row_S: Tensor,
        position_S: Tensor,
        wanted: LogprobsRequest,
    ) -> Tensor:
        """Sample, store the tokens in the request state, and return float64 [S, C]."""
        rules = self._penalties(requests, row_S)
        if self._rank.layout.tp > 1 and rules is not None and self._ops.count_last_tokens is not None:
            self._ops.count_last_tokens(position_S, rules)  # also of rows that other ranks sample

        def sample(whole_MV: Tensor, mine: slice) -> Tensor:
            whole_MV = pad_vocabulary(whole_MV, self._vocab_size)[:, : self._vocab_size]
            return self._numbers(whole_MV, requests[mine], row_S[mine], position_S[mine], wanted)

        numbers_SC = self._rank.map_whole_rows(logits_SV, wanted.columns, sample)
        self._rows.store_sampled(row_S, numbers_SC[:, 0].long())
        return numbers_SC

    def _numbers(
        self,
        raw_MV: Tensor,
        requests: Sequence[Request],
        row_M: Tensor,
        position_M: Tensor,
        wanted: LogprobsRequest,
    ) -> Tensor:
        if self._ops.sample is None:
            rows, last_M = self._rows.sampling(row_M, position_M), self._rows.last_R[row_M]
            numbers_M3 = sample_by_reference(raw_MV, requests, rows, self._rules, last_M)
            if not wanted.logprobs:
                return numbers_M3
            ranks = rank_tokens(raw_MV, numbers_M3[:, 0].long(), wanted.top)
        else:
            sampled = self._sample(raw_MV, requests, row_M, position_M)
            columns = [sampled.ids, sampled.raw_best, sampled.best]
            numbers_M3 = torch.stack([column.double() for column in columns], 1)
            if not wanted.logprobs:
                return numbers_M3
            stats = [sampled.raw_best, sampled.total, sampled.logit, sampled.rank]
            value_MN, id_MN = likeliest(raw_MV, wanted.top)
            ranks = CandidateRanks(torch.stack([each.double() for each in stats], 1), id_MN, value_MN)
        return torch.cat([numbers_M3, rank_columns(ranks)], 1)

    def _penalties(self, requests: Sequence[Request], row_S: Tensor) -> PenaltyState | None:
        return None if self._rows.rules is None else self._rows.rules.of(row_S, self._rows.last_R, requests)

    def _sample(
        self, raw_MV: Tensor, requests: Sequence[Request], row_M: Tensor, position_M: Tensor
    ) -> Sampled:
        assert self._ops.sample is not None
        rules = self._penalties(requests, row_M)
        sampled = self._ops.sample(raw_MV, self._rows.sampling(row_M, position_M), rules)
        masked = [place for place, request in enumerate(requests) if request.mask is not None]
        for start in range(0, len(masked), _MASKED_AT_ONCE):
            places = masked[start : start + _MASKED_AT_ONCE]
            self._sample_masked(sampled, places, raw_MV, requests, row_M, position_M)
        return sampled

    def _sample_masked(
        self,
        sampled: Sampled,
        places: list[int],
        raw_MV: Tensor,
        requests: Sequence[Request],
        row_M: Tensor,
        position_M: Tensor,
    ) -> None:
        """Sample these rows again under their grammar masks, which the kernel does not support.

        Their last tokens are not counted twice: the kernel counts once per position.
        """
        assert self._ops.sample is not None
        chosen = [requests[place] for place in places]
        place_G = move(torch.tensor(places), raw_MV.device)
        bits = mask_bits([request.mask for request in chosen if request.mask is not None])
        raw_GV = raw_MV.index_select(0, place_G)
        allowed_GV = move(bits, raw_MV.device)[:, : raw_MV.shape[1]] > 0
        row_G, position_G = row_M[place_G], position_M[place_G]
        masked_GV = raw_GV.masked_fill(~allowed_GV, FORBIDDEN)
        rules = self._penalties(chosen, row_G)
        drawn = self._ops.sample(masked_GV, self._rows.sampling(row_G, position_G), rules)
        sampled.ids.index_copy_(0, place_G, drawn.ids)
        sampled.best.index_copy_(0, place_G, drawn.best)
        _, total_G, logit_G, rank_G = rank_tokens(raw_GV, drawn.ids, 0).stats_S4.unbind(1)
        sampled.total.index_copy_(0, place_G, total_G.to(sampled.total.dtype))
        sampled.logit.index_copy_(0, place_G, logit_G.to(sampled.logit.dtype))
        sampled.rank.index_copy_(0, place_G, rank_G.to(sampled.rank.dtype))


@contextmanager
def _assuming_drafts(rows: Sequence[ScheduledRequest], count: int) -> Iterator[None]:
    """Let the first drafts of these rows be tokens of their requests, with the masks after them."""
    masks = [row.request.mask for row in rows]
    for row in rows:
        row.request.token_ids += row.drafts[:count]
        row.request.mask = row.draft_masks[count - 1] if count <= len(row.draft_masks) else None
    try:
        yield
    finally:
        for row, mask in zip(rows, masks, strict=True):
            row.request.mask = mask
            del row.request.token_ids[-count:]
