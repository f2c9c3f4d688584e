"""Synchronous sampler: groups the rows of a step by sampling method and returns a token or an error for each.

R rows, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops
from llmbox.kernels.sampling_types import DrawRow

from ..core.request import Request
from ..core.step import SampledToken
from ..ipc.messages import TokenLogprobs
from ..sampling_params import SamplingParams
from .draw import SampledRows, SamplingTensors, draw_binned, draw_greedy, draw_ranked, draw_whole
from .logits_processors import LogitsProcessorCache, LogitsProcessors, apply_rules, may_change_logits
from .logprobs import ranked_logprobs, token_logprobs
from .philox import uniform
from .topk import best_of, next_size

_T = TypeVar("_T")

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would leave one token, or overflow."""

_ROWS_AT_ONCE = {"cpu": 1, "cuda": 64}
# On a CPU a row and its probabilities stay in the core's cache; on a GPU this bounds the int64 scratch space.

BROKEN = (
    "the model produced NaN or infinite logits for this request: its weights may be damaged, or its numbers "
    "too large for the dtype that it was loaded with"
)
NOTHING_LEFT = (
    "no token is left to choose: allowed_token_ids, bad_words, min_tokens and the grammar forbid every one"
)


class _Method(NamedTuple):
    """Sampling method of a row; rows with equal methods are sampled together."""

    edited: bool
    kind: Literal["greedy", "whole", "ranked", "binned"]
    size: int = 0
    """Candidates of the method `ranked`."""
    cuts_k: bool = False


PLAIN_GREEDY = _Method(edited=False, kind="greedy")


class Sampler:
    """Samples the next token of each row. A row's result never depends on the other rows.

    Keeps token counts of requests with penalties between calls, as long as they run.
    """

    def __init__(self, vocab_size: int, device: torch.device, ops: Ops | None = None) -> None:
        """`ops`: backend whose `best_of`, `draw` and `rank`, where it has them, do the same faster.

        Then logits must be its own: float32 rows that do not overlap.
        """
        self._vocab_size = vocab_size
        self._find_best = (ops.best_of if ops else None) or best_of
        self._draw_rows = ops.draw if ops else None
        self._rank = ops.rank if ops else None
        self._device = device
        self._rows_at_once = _ROWS_AT_ONCE.get(device.type, 1)
        self._rules = LogitsProcessorCache(vocab_size)

    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[SampledToken | str]:
        """Return one result per row: the token, or the message of the error that ends this request alone.

        `logits_RV` may have any float dtype and is not changed. Columns beyond the vocabulary are padding.
        The sampled token gets position `request.num_tokens`.
        """
        logits_RV = logits_RV[:, : self._vocab_size]
        active = self._rules.active(requests)
        if all(is_greedy(request.params) and is_plain(request.params) for request in requests):
            return self._greedy(logits_RV)
        if self._draw_rows is not None:
            rows = [draw_row(request, active.get(request.request_id)) for request in requests]
            drawn = self._draw_rows(logits_RV, rows)
            chosen = [problem_of(row.raw_best, row.best) or int(row.id) for row in drawn]
        else:
            methods = [
                self._method(request.params, edited=request.request_id in active) for request in requests
            ]
            chosen = self._choose(logits_RV, requests, methods)
        return self._with_logprobs(logits_RV, requests, chosen)

    def _greedy(self, logits_RV: Tensor) -> list[SampledToken | str]:
        """Do as `_choose` in fewer operations, where only the largest logit counts."""
        best_R, id_R = self._find_best(logits_RV)
        return [
            problem_of(best, best) or SampledToken(token)
            for best, token in zip(best_R.tolist(), id_R.tolist(), strict=True)
        ]

    def prompt_logprobs(self, logits_TV: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Return log-probabilities: entry t is that of `next_ids[t]` after row t. NaN for invalid rows."""
        logits_TV = logits_TV[:, : self._vocab_size]
        return self._logprobs(logits_TV, [(row, token, top) for row, token in enumerate(next_ids)])

    def _logprobs(self, logits_RV: Tensor, wanted: list[tuple[int, int, int]]) -> list[TokenLogprobs]:
        """Compute entries of `wanted`: (row, its id, number of alternatives), by ascending rows."""
        if self._rank is not None and wanted:
            rows, ids, top = zip(*wanted, strict=True)
            return ranked_logprobs(self._rank(logits_RV, rows, ids, max(top)), ids, top)
        entries: list[TokenLogprobs] = []
        for part in self._parts(wanted):
            rows, ids, top = zip(*part, strict=True)
            entries += token_logprobs(_take(logits_RV, rows).float(), ids, top)
        return entries

    def _method(self, params: SamplingParams, *, edited: bool) -> _Method:
        if params.temperature < GREEDY_BELOW:
            return _Method(edited, "greedy")
        cuts_k = 0 < params.top_k < self._vocab_size
        if not cuts_k and params.top_p >= 1.0:
            return _Method(edited, "whole")
        return _Method(edited, "ranked", next_size(params.top_k if cuts_k else 0, self._vocab_size), cuts_k)

    def candidates(self, params: SamplingParams) -> tuple[int, bool]:
        """Return, for a row that is not greedy, the number of candidates to rank first (0: no ranking needed)
        and whether top-k keeps only these.
        """
        method = self._method(params, edited=False)
        return method.size, method.cuts_k

    def _thorough(self, method: _Method) -> _Method:
        """Return the next method to try where the candidates were too few."""
        if self._device.type == "cpu" and not method.cuts_k:
            return method._replace(kind="binned")
        return method._replace(size=next_size(method.size, self._vocab_size))

    def _choose(
        self, logits_RV: Tensor, requests: Sequence[Request], methods: Sequence[_Method]
    ) -> list[int | str]:
        chosen: list[int | str] = [NOTHING_LEFT] * len(requests)
        waiting = dict(enumerate(methods))
        while waiting:
            for row, method, outcome in list(self._run(logits_RV, requests, waiting)):
                token, raw_best, best, covered = outcome
                problem = problem_of(raw_best, best)
                if covered or problem:
                    chosen[row] = problem or int(token)
                    del waiting[row]
                else:
                    waiting[row] = self._thorough(method)
        return chosen

    def _run(
        self, logits_RV: Tensor, requests: Sequence[Request], waiting: dict[int, _Method]
    ) -> Iterator[tuple[int, _Method, list[float]]]:
        """Sample all waiting rows; synchronize with the device once, after all work is queued."""
        groups: dict[_Method, list[int]] = defaultdict(list)
        for row, method in waiting.items():
            groups[method].append(row)
        order: list[tuple[int, _Method]] = []
        outcomes: list[Tensor] = []
        for method, rows in groups.items():
            parts = [rows] if method == PLAIN_GREEDY else self._parts(rows)
            for part in parts:
                part_RV = _take(logits_RV, part)
                outcomes.append(self._draw(part_RV, [requests[row] for row in part], method))
                order += [(row, method) for row in part]
        for (row, method), outcome in zip(order, torch.cat(outcomes).tolist(), strict=True):
            yield row, method, outcome

    def _draw(self, logits_RV: Tensor, requests: list[Request], method: _Method) -> Tensor:
        """Return float64 [R, 4]: id, largest logit before and after the logits processors, whether the id is
        final.
        """
        raw_best_R: Tensor | None = None
        if method.edited:
            raw_best_R = best_of(logits_RV)[0]
            logits_RV = logits_RV.to(torch.float32, copy=True)
            apply_rules(logits_RV, [self._rules.of(request) for request in requests])
        drawn = self._draw_method(logits_RV, requests, method)
        raw_best_R = drawn.best if raw_best_R is None else raw_best_R
        columns = (drawn.id, raw_best_R, drawn.best, drawn.covered)
        return torch.stack([column.double() for column in columns], 1)

    def _draw_method(self, logits_RV: Tensor, requests: list[Request], method: _Method) -> SampledRows:
        if method.kind == "greedy":
            return draw_greedy(logits_RV, self._find_best)
        knobs = self.knobs(requests)
        if method.kind == "whole":
            return draw_whole(logits_RV.float(), knobs)
        if method.kind == "binned":
            return draw_binned(logits_RV.float(), knobs)
        return draw_ranked(logits_RV.float(), knobs, method.size, cuts_k=method.cuts_k)

    def knobs(self, requests: list[Request]) -> SamplingTensors:
        rows = [
            (
                request.params.temperature,
                request.params.top_k if 0 < request.params.top_k < self._vocab_size else self._vocab_size,
                request.params.top_p,
                request.params.min_p,
                uniform(request.params.seed, request.num_tokens),
            )
            for request in requests
        ]
        knobs_R5 = torch.tensor(rows, dtype=torch.float64).to(self._device)
        temperature_R, top_k_R, top_p_R, min_p_R, noise_R = knobs_R5.unbind(1)
        uses_min_p = any(request.params.min_p > 0 for request in requests)
        return SamplingTensors(
            temperature_R, top_k_R.to(torch.int64), top_p_R, min_p_R if uses_min_p else None, noise_R
        )

    def _with_logprobs(
        self, logits_RV: Tensor, requests: Sequence[Request], chosen: Sequence[int | str]
    ) -> list[SampledToken | str]:
        results = [pick if isinstance(pick, str) else SampledToken(pick) for pick in chosen]
        wanted = [
            (row, pick, request.params.logprobs)
            for row, (pick, request) in enumerate(zip(chosen, requests, strict=True))
            if isinstance(pick, int) and request.params.logprobs is not None
        ]
        for (row, _, _), entry in zip(wanted, self._logprobs(logits_RV, wanted), strict=True):
            results[row] = SampledToken(entry.token_id, entry)
        return results

    def _parts(self, rows: list[_T]) -> Iterator[list[_T]]:
        for start in range(0, len(rows), self._rows_at_once):
            yield rows[start : start + self._rows_at_once]


def _take(logits_RV: Tensor, rows: Sequence[int]) -> Tensor:
    """Select rows, in ascending order; a view without a copy where they are contiguous."""
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows):
        return logits_RV[first : last + 1]
    return logits_RV[list(rows)]


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


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def is_plain(params: SamplingParams) -> bool:
    """Return whether the row is sampled from the model's unchanged logits, without log-probabilities."""
    return params.logprobs is None and not may_change_logits(params)


def problem_of(raw_best: float, best: float) -> str | None:
    """Return why a row has no token, or None, from its largest logit before and after logits processors."""
    if not math.isfinite(raw_best):
        return BROKEN
    return NOTHING_LEFT if best == -math.inf else None
