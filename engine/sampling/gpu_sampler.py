"""Asynchronous sampler for GPUs: sampled ids stay on the device, a copy goes to the host.

S sampling rows, V vocabulary, N requested alternatives, C columns of `DeviceSamplerOutput`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops
from llmbox.kernels.sampling_types import PartOps, Sampled, SampleRows

from ..core.request import Request
from ..core.step import SampledToken
from ..device.upload import move
from ..ipc.messages import TokenLogprobs
from ..sampling_params import SamplingParams
from .device_penalties import DevicePenalties
from .device_state import DeviceRequestState
from .draw_async import GREEDY_BELOW, SamplingKinds, facts, likeliest, plain_sample
from .integer_softmax import log_total
from .logits_processors import FORBIDDEN, LogitsProcessorCache, LogitsProcessors, apply_rules, mask_bits
from .sampler import problem_of
from .topk import best_of

FEWEST_CANDIDATES = 256
_MASKED_AT_ONCE = 16
"""Rows: bounds what masks and copies of logits take."""


@dataclass(frozen=True, slots=True)
class DeviceSamplerOutput:
    """Sampled ids and the numbers from which tokens and log-probabilities are built.

    `numbers_SC`, float64 on the device: id, largest logit before and after the logits processors; with
    `logprobs` also logit, sum of weights and rank of the id; then N ids and their N logits.
    """

    numbers_SC: Tensor
    ids_S: Tensor
    requests: list[Request]
    logprobs: bool
    top: int

    def read(self, rows: Sequence[Sequence[float]]) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Build tokens and errors by request id, from `numbers_SC` on the host."""
        tokens: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        for request, row in zip(self.requests, rows, strict=True):
            problem = problem_of(row[1], row[2])
            if problem is not None:
                failed[request.request_id] = problem
            else:
                tokens[request.request_id] = SampledToken(int(row[0]), self._logprobs(request.params, row))
        return tokens, failed

    def _logprobs(self, params: SamplingParams, row: Sequence[float]) -> TokenLogprobs | None:
        if params.logprobs is None:
            return None
        token, best = int(row[0]), row[1]
        logit, total, rank = row[3:6]
        norm = log_total(best, int(total))
        ids, logits = row[6 : 6 + params.logprobs], row[6 + self.top : 6 + self.top + params.logprobs]
        top = [(int(i), value - norm) for i, value in zip(ids, logits, strict=True)]
        return TokenLogprobs(token_id=token, logprob=logit - norm, rank=int(rank), top=top)


class LogprobsRequest(NamedTuple):
    """Numbers to compute besides the ids, the same for all rows of a step."""

    logprobs: bool
    top: int
    """Number of alternatives."""

    @property
    def columns(self) -> int:
        """Columns of `DeviceSamplerOutput.numbers_SC`."""
        return 3 + 3 * self.logprobs + 2 * self.top


class SampleResult(NamedTuple):
    ids_S: Tensor
    raw_best_S: Tensor
    best_S: Tensor
    sampled: Sampled | None
    """Result of the backend's sampling kernel, where it has one."""


class DeviceSampler:
    """Samples whole rows with the backend's kernel, or in plain torch."""

    def __init__(self, ops: Ops, rows: DeviceRequestState, vocab_size: int) -> None:
        self._ops = ops
        self.rows = rows
        self._vocab_size = vocab_size
        self._rules = LogitsProcessorCache(vocab_size)
        if self.has_kernel:
            rows.rules = DevicePenalties(rows.spare + 1, vocab_size, rows.last_R.device)

    @property
    def has_kernel(self) -> bool:
        """True where the backend has a kernel that applies penalties and samples whole rows."""
        return self._ops.sample is not None

    @property
    def parts(self) -> PartOps | None:
        return self._ops.parts

    def sample(self, logits_RV: Tensor, rows: SampleRows) -> Sampled:
        """Sample with the backend's kernel, without penalties."""
        assert self._ops.sample is not None
        return self._ops.sample(logits_RV, rows)

    def count(self, requests: Sequence[Request], row_S: Tensor, position_S: Tensor) -> None:
        """Count each row's last token for penalties, also of rows that another rank samples."""
        if self._ops.parts is None or self.rows.rules is None:
            return
        if (rules := self.rows.rules.of(row_S, self.rows.last_R, requests)) is not None:
            self._ops.parts.count(position_S, rules)

    def draw(
        self, logits_SV: Tensor, requests: list[Request], row_S: Tensor, position_S: Tensor
    ) -> DeviceSamplerOutput:
        """Sample, and store the tokens in the request state.

        Logit columns beyond the vocabulary are padding.
        """
        wanted = logprobs_request(requests, self._vocab_size)
        ids_S, numbers_SC = self.numbers(logits_SV, requests, row_S, position_S, wanted)
        self.rows.store_sampled(row_S, ids_S)
        return DeviceSamplerOutput(numbers_SC, ids_S, requests, *wanted)

    def numbers(
        self,
        logits_SV: Tensor,
        requests: Sequence[Request],
        row_S: Tensor,
        position_S: Tensor,
        wanted: LogprobsRequest,
    ) -> tuple[Tensor, Tensor]:
        """Return ids and the columns of `DeviceSamplerOutput.numbers_SC`."""
        raw_SV = logits_SV[:, : self._vocab_size]
        choose = self._by_kernel if self.has_kernel else self._by_torch
        ids_S, raw_best_S, best_S, sampled = choose(raw_SV, requests, row_S, position_S)
        columns = [ids_S, raw_best_S, best_S]
        if wanted.logprobs:
            told = facts(raw_SV, ids_S) if sampled is None else sampled
            columns += [told.logit, told.total, told.rank]
        if wanted.top:
            value_SN, id_SN = likeliest(raw_SV, wanted.top)
            columns += [*id_SN.unbind(1), *value_SN.unbind(1)]
        return ids_S, torch.stack([column.double() for column in columns], 1)

    def _by_kernel(
        self, raw_SV: Tensor, requests: Sequence[Request], row_S: Tensor, position_S: Tensor
    ) -> SampleResult:
        assert self._ops.sample is not None
        assert self.rows.rules is not None
        rules = self.rows.rules.of(row_S, self.rows.last_R, requests)
        sampled = self._ops.sample(raw_SV, self.rows.sampling(row_S, position_S), rules)
        masked = [place for place, request in enumerate(requests) if request.mask is not None]
        for start in range(0, len(masked), _MASKED_AT_ONCE):
            self._mask_rows(
                sampled, masked[start : start + _MASKED_AT_ONCE], raw_SV, requests, row_S, position_S
            )
        return SampleResult(sampled.ids, sampled.raw_best, sampled.best, sampled)

    def _mask_rows(
        self,
        sampled: Sampled,
        places: list[int],
        raw_SV: Tensor,
        requests: Sequence[Request],
        row_S: Tensor,
        position_S: Tensor,
    ) -> None:
        """Sample these rows again under their grammar masks, which the kernel does not support.

        Their last tokens are not counted twice: the kernel counts once per position.
        """
        assert self._ops.sample is not None
        assert self.rows.rules is not None
        chosen = [requests[place] for place in places]
        place_M = move(torch.tensor(places), raw_SV.device)
        bits = mask_bits([request.mask for request in chosen if request.mask is not None])
        raw_MV = raw_SV.index_select(0, place_M)
        left_MV = move(bits, raw_SV.device)[:, : raw_SV.shape[1]] > 0
        row_M, position_M = row_S[place_M], position_S[place_M]
        rules = self.rows.rules.of(row_M, self.rows.last_R, chosen)
        masked_MV = raw_MV.masked_fill(~left_MV, FORBIDDEN)
        drawn = self._ops.sample(masked_MV, self.rows.sampling(row_M, position_M), rules)
        told = facts(raw_MV, drawn.ids)
        sampled.ids.index_copy_(0, place_M, drawn.ids)
        sampled.best.index_copy_(0, place_M, drawn.best)
        for name in ("logit", "total", "rank"):
            getattr(sampled, name).index_copy_(0, place_M, getattr(told, name))

    def _by_torch(
        self, raw_SV: Tensor, requests: Sequence[Request], row_S: Tensor, position_S: Tensor
    ) -> SampleResult:
        edited_SV = self._apply_processors(raw_SV, requests, row_S)
        needs = sampling_kinds([request.params for request in requests], self._vocab_size)
        if needs.whole or needs.candidates:
            ids_S, best_S, _ = plain_sample(edited_SV, self.rows.sampling(row_S, position_S), needs)
        else:
            best_S, ids_S = best_of(edited_SV)
        return SampleResult(ids_S, best_S if edited_SV is raw_SV else best_of(raw_SV)[0], best_S, None)

    def _apply_processors(self, logits_SV: Tensor, requests: Sequence[Request], row_S: Tensor) -> Tensor:
        """Apply logits processors to a float32 copy; return the same tensor where there are none."""
        active = self._rules.active(requests)
        if not active:
            return logits_SV
        places = [row for row, request in enumerate(requests) if request.request_id in active]
        rules: list[LogitsProcessors] = [active[requests[row].request_id] for row in places]
        place_E = move(torch.tensor(places), logits_SV.device)
        last_E = self.rows.last_R[row_S[place_E]]
        edited_SV = logits_SV.to(torch.float32, copy=True)
        part_EV = edited_SV.index_select(0, place_E)
        apply_rules(part_EV, rules, last_E)
        return edited_SV.index_copy_(0, place_E, part_EV)


def logprobs_request(requests: Sequence[Request], vocab_size: int) -> LogprobsRequest:
    counts = [request.params.logprobs for request in requests if request.params.logprobs is not None]
    return LogprobsRequest(bool(counts), min(max(counts, default=0), vocab_size))


def sampling_kinds(params: Sequence[SamplingParams], vocab_size: int) -> SamplingKinds:
    """Return the sampling methods of these rows.

    Top-p without top-k may have to rank the whole vocabulary.
    """
    greedy = whole = False
    candidates = 0
    for one in params:
        cuts_k = 0 < one.top_k < vocab_size
        if one.temperature < GREEDY_BELOW:
            greedy = True
        elif cuts_k:
            candidates = max(candidates, one.top_k, FEWEST_CANDIDATES)
        elif one.top_p < 1.0:
            candidates = vocab_size
        else:
            whole = True
    return SamplingKinds(greedy, whole, min(candidates, vocab_size))
