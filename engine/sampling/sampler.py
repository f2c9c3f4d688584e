"""Sampler for CPUs: returns a token or an error for each row.

R rows, V vocabulary, N alternatives, C columns of numbers for a row: id, largest logit before and after the
logits processors; with log-probabilities also the columns of `rank_columns`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops
from llmbox.kernels.reference.sampling import GREEDY_BELOW, ONE, SamplingKinds, rank_tokens, sample_rows
from llmbox.kernels.sampling_types import CandidateRanks, DrawRow, SampleRows

from ..core.request import Request
from ..core.step import SampledToken
from ..distributed.communicator import SINGLE, TensorParallel
from ..ipc.messages import TokenLogprobs
from ..sampling_params import SamplingParams
from .logits_processors import LogitsProcessorCache, LogitsProcessors

_ROWS_AT_ONCE = {"cpu": 1, "cuda": 64}
# On a CPU a row and its probabilities stay in the core's cache; on a GPU this bounds the int64 scratch space.
_STATS = 4
"""Columns of `CandidateRanks.stats_S4`."""

BROKEN = (
    "the model produced NaN or infinite logits for this request: its weights may be damaged, or its numbers "
    "too large for the dtype that it was loaded with"
)
NOTHING_LEFT = (
    "no token is left to choose: allowed_token_ids, bad_words, min_tokens and the grammar forbid every one"
)


class LogprobsRequest(NamedTuple):
    """Numbers to compute besides the ids, the same for all rows of a step."""

    logprobs: bool
    top: int
    """Number of alternatives."""

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int) -> "LogprobsRequest":
        counts = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        return cls(bool(counts), min(max(counts, default=0), vocab_size))

    @property
    def columns(self) -> int:
        return 3 + (rank_column_count(self.top) if self.logprobs else 0)


class Sampler:
    """Samples the next token of each row. A row's result never depends on the other rows.

    Keeps token counts of requests with penalties between calls, as long as they run.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, ops: Ops | None = None, rank: TensorParallel = SINGLE
    ) -> None:
        """`ops`: backend whose `best_of`, `draw` and `rank`, where it has them, do the same faster.

        Then logits must be its own: float32 rows that do not overlap. `rank`: has a shard of each row.
        """
        self._vocab_size = vocab_size
        self._find_best = ops.best_of if ops else None
        self.finds_best = self._find_best is not None and rank.layout.tp == 1
        """True if `Ops.best_of` the model's logits tells the ids of plain rows (`is_plain`)."""
        self._draw_rows = ops.draw if ops else None
        self._rank_rows = ops.rank if ops else None
        self._device = device
        self._rank = rank
        self._rows_at_once = _ROWS_AT_ONCE.get(device.type, 1)
        self._rules = LogitsProcessorCache(vocab_size)

    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[SampledToken | str]:
        """Return one result per row: the token, or the message of the error that ends this request alone.

        `logits_RV` may have any float dtype and is not changed. Columns beyond the vocabulary are padding.
        The sampled token gets position `request.num_tokens`.
        """
        wanted = LogprobsRequest.of(requests, self._vocab_size)
        numbers_RC = self._rank.map_whole_rows(
            logits_RV,
            wanted.columns,
            lambda whole_MV, mine: self._numbers(whole_MV[:, : self._vocab_size], requests[mine], wanted),
        )
        return read_samples(numbers_RC.tolist(), requests, wanted.top)

    def prompt_logprobs(self, logits_TV: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Return log-probabilities: entry t is that of `next_ids[t]` after row t. NaN for invalid rows."""
        top = min(top, self._vocab_size)

        def rank(whole_MV: Tensor, mine: slice) -> Tensor:
            ids = next_ids[mine]
            return self._rank_columns(whole_MV[:, : self._vocab_size], range(len(ids)), ids, top)

        numbers = self._rank.map_whole_rows(logits_TV, rank_column_count(top), rank).tolist()
        return [logprobs_of(row, token, top, top) for row, token in zip(numbers, next_ids, strict=True)]

    def _numbers(self, logits_RV: Tensor, requests: Sequence[Request], wanted: LogprobsRequest) -> Tensor:
        """Return float64 [R, C] of whole rows."""
        numbers_R3 = self._choose(logits_RV, requests)
        rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        if not wanted.logprobs:
            return numbers_R3
        numbers_RC = numbers_R3.new_zeros(len(requests), wanted.columns)
        numbers_RC[:, :3] = numbers_R3
        if rows:
            ids = numbers_R3[rows, 0].long().tolist()
            numbers_RC[rows, 3:] = self._rank_columns(logits_RV, rows, ids, wanted.top)
        return numbers_RC

    def _choose(self, logits_RV: Tensor, requests: Sequence[Request]) -> Tensor:
        """Return float64 [R, 3]: id, largest logit before and after the logits processors."""
        if self._find_best is not None and all(map(_takes_best, requests)):
            best_R, id_R = self._find_best(logits_RV)
            return torch.stack([id_R.double(), best_R.double(), best_R.double()], 1)
        if self._draw_rows is not None:
            active = self._rules.active(requests)
            rows = [draw_row(request, active.get(request.request_id)) for request in requests]
            return self._draw_rows(logits_RV, rows)
        parts = []
        for start in range(0, len(requests), self._rows_at_once):
            part = slice(start, start + self._rows_at_once)
            rows_P = sample_rows_of(requests[part], self._vocab_size, self._device)
            parts.append(sample_by_reference(logits_RV[part], requests[part], rows_P, self._rules))
        return torch.cat(parts) if parts else torch.empty(0, 3, dtype=torch.float64)

    def _rank_columns(self, logits_RV: Tensor, rows: Sequence[int], ids: Sequence[int], top: int) -> Tensor:
        if self._rank_rows is not None and len(rows):
            return rank_columns(self._rank_rows(logits_RV, rows, ids, top))
        id_R = torch.tensor(ids, dtype=torch.int64, device=logits_RV.device)
        return rank_columns(rank_tokens(logits_RV[list(rows)], id_R, top))


def sample_by_reference(
    logits_RV: Tensor,
    requests: Sequence[Request],
    rows: SampleRows,
    processors: LogitsProcessorCache,
    last_R: Tensor | None = None,
) -> Tensor:
    """Sample by plain torch, on any device. Returns float64 [R, 3] as `Sampler` does for whole rows.

    `last_R`: see `LogitsProcessorCache.apply`.
    """
    edited_RV = processors.apply(logits_RV, requests, last_R)
    kinds = sampling_kinds([request.params for request in requests], logits_RV.shape[1])
    id_R, best_R = sample_rows(edited_RV, rows, kinds)
    raw_best_R = best_R if edited_RV is logits_RV else logits_RV.amax(-1)
    return torch.stack([id_R.double(), raw_best_R.double(), best_R.double()], 1)


def sampling_kinds(params: Sequence[SamplingParams], vocab_size: int) -> SamplingKinds:
    """Return the sampling methods of these rows.

    Top-p without top-k may have to rank the whole vocabulary.
    """
    drawn = [one for one in params if not is_greedy(one)]
    whole = any(one.top_p >= 1.0 and not 0 < one.top_k < vocab_size for one in drawn)
    ranked = [one.top_k if 0 < one.top_k < vocab_size else vocab_size * (one.top_p < 1.0) for one in drawn]
    return SamplingKinds(whole, max(ranked, default=0))


def sample_rows_of(requests: Sequence[Request], vocab_size: int, device: torch.device) -> SampleRows:
    """Build the sampling parameters of rows from their requests."""
    numbers = [sampling_numbers(request.params, vocab_size) for request in requests]
    reals_R3 = torch.tensor([reals for reals, _ in numbers], dtype=torch.float64).to(device)
    integers_R3 = torch.tensor([integers for _, integers in numbers]).to(device)
    positions = torch.tensor([request.num_tokens for request in requests]).to(device)
    temperature, top_p, min_p = reals_R3.unbind(1)
    seed, top_k, logprobs = integers_R3.unbind(1)
    return SampleRows(temperature, top_k.int(), top_p, min_p, seed, positions, logprobs.int())


def sampling_numbers(params: SamplingParams, vocab_size: int) -> tuple[Sequence[float], Sequence[int]]:
    """Return (temperature, top-p, min-p) and (seed, top-k, whether log-probabilities are wanted)."""
    seed = (params.seed + (1 << 63)) % (1 << 64) - (1 << 63)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return (params.temperature, params.top_p, params.min_p), (seed, top_k, params.logprobs is not None)


def draw_row(request: Request, rules: LogitsProcessors | None) -> DrawRow:
    """Build a row of `Ops.draw`; `rules`: logits processors where they change this row."""
    params = request.params
    return DrawRow(
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        params.seed,
        request.num_tokens,
        None if rules is None else rules.edits(),
    )


def take_best(best_R: Tensor, id_R: Tensor) -> list[SampledToken | str]:
    """Build tokens and errors from `Ops.best_of` rows that are all `is_plain`."""
    best = zip(best_R.tolist(), id_R.tolist(), strict=True)
    return [problem_of(logit, logit) or SampledToken(token) for logit, token in best]


def read_samples(
    numbers: Sequence[Sequence[float]], requests: Sequence[Request], top: int
) -> list[SampledToken | str]:
    """Build tokens and errors from rows of C numbers on the host. `top`: alternatives of every row."""
    results: list[SampledToken | str] = []
    for row, request in zip(numbers, requests, strict=True):
        token, wanted = int(row[0]), request.params.logprobs
        if problem := problem_of(row[1], row[2]):
            results.append(problem)
        elif wanted is None:
            results.append(SampledToken(token))
        else:
            results.append(SampledToken(token, logprobs_of(row[3:], token, wanted, top)))
    return results


def rank_columns(ranks: CandidateRanks) -> Tensor:
    """Lay out `CandidateRanks` as float64 columns: 4 statistics, N ids, N logits."""
    return torch.cat([ranks.stats_S4, ranks.ids_SN.double(), ranks.logits_SN.double()], 1)


def rank_column_count(top: int) -> int:
    """Return the columns of `rank_columns` with `top` alternatives."""
    return _STATS + 2 * top


def logprobs_of(row: Sequence[float], token: int, wanted: int, top: int) -> TokenLogprobs:
    """Build the log-probabilities of `token` from a row of `rank_columns` with `top` alternatives.

    They are of the model's unchanged logits: penalties, bias, masks and temperature are not applied (vLLM's
    default, `raw_logprobs`). A row with NaN or infinity has none: logprob NaN, rank 0, no alternatives.
    """
    best, total, logit, rank = row[:_STATS]
    if not math.isfinite(best):
        return TokenLogprobs(token_id=token, logprob=math.nan, rank=0)
    norm = best + math.log(total / ONE)
    ids, logits = row[_STATS : _STATS + min(wanted, top)], row[_STATS + top :]
    alternatives = [(int(i), value - norm) for i, value in zip(ids, logits, strict=False)]
    return TokenLogprobs(token_id=token, logprob=logit - norm, rank=int(rank), top=alternatives)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def _takes_best(request: Request) -> bool:
    return is_greedy(request.params) and request.mask is None and not request.edits_logits


def is_plain(request: Request) -> bool:
    """Return True if a row's result is the likeliest id of its logits, and nothing else is wanted."""
    return _takes_best(request) and request.params.logprobs is None


def problem_of(raw_best: float, best: float) -> str | None:
    """Return why a row has no token, or None, from its largest logit before and after logits processors."""
    if not math.isfinite(raw_best):
        return BROKEN
    return NOTHING_LEFT if best == -math.inf else None
