"""Synchronous sampler for tensor parallelism: each rank has the logits of its vocabulary shard.

All ranks of the last stage sample from the same numbers and get the same ids. Bytes that each sends per row:

    greedy                              16 bytes: its best logit and id
    temperature, min-p                  20 bytes: its best logit, sum of weights, sampled id
    top-k, top-p                        12 bytes for each of 256 or 4096 candidates, and a sum of weights
    penalties, bias, masks, logprobs    the row's logits: vocabulary / tp numbers
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..core.request import Request
from ..core.step import SampledToken
from ..distributed.communicator import TensorParallel
from ..ipc.messages import TokenLogprobs
from ..sampling_params import SamplingParams
from . import Sampler
from .draw import SampledRows
from .sampler import is_greedy, is_plain, problem_of
from .token_sampler import TokenSampler
from .tp_draw import TPDraw

Pick = SampledToken | str


class SamplingStrategy(NamedTuple):
    """Sampling method of a row; rows with equal strategies are sampled together."""

    size: int
    """Candidates of each rank; 0: no ranking needed."""
    cuts_k: bool


GREEDY = SamplingStrategy(-1, cuts_k=False)
TOGETHER = SamplingStrategy(-2, cuts_k=False)
"""Sample from the gathered row."""


def rank_sampler(rank: TensorParallel, whole: Sampler, vocab: int) -> TokenSampler:
    if not rank.layout.is_last:
        return NullSampler()
    return whole if rank.layout.tp == 1 else TPSampler(rank, whole, vocab)


class TPSampler:
    """`TokenSampler` for logits [R, V of this rank]."""

    def __init__(self, rank: TensorParallel, whole: Sampler, vocab: int) -> None:
        """`whole` samples from gathered rows."""
        self._rank = rank
        self._whole = whole
        self._part = rank.layout.vocabulary(vocab)
        self._held = self._part.stop - self._part.start

    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[Pick]:
        """Sample as `Sampler.sample`."""
        picks: dict[int, Pick] = {}
        ways = [self._way(request.params) for request in requests]
        for way in sorted(set(ways) - {TOGETHER}):
            rows = [row for row, each in enumerate(ways) if each == way]
            drawn = self._draw(logits_RV[rows], [requests[row] for row in rows], way)
            for row, token, best, covered in zip(rows, *(each.tolist() for each in drawn), strict=True):
                if problem := problem_of(best, best):
                    picks[row] = problem
                elif covered:
                    picks[row] = SampledToken(token)
        rest = [row for row in range(len(requests)) if row not in picks]
        if rest:
            found = self._whole.sample(self._gather(logits_RV[rest]), [requests[row] for row in rest])
            picks |= zip(rest, found, strict=True)
        return [picks[row] for row in range(len(requests))]

    def prompt_logprobs(self, logits_TV: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        return self._whole.prompt_logprobs(self._gather(logits_TV), next_ids, top)

    def _way(self, params: SamplingParams) -> SamplingStrategy:
        if not is_plain(params):
            return TOGETHER
        if is_greedy(params):
            return GREEDY
        size, cuts_k = self._whole.candidates(params)
        # Candidates of half a shard or more cost as much as gathering the rows.
        return SamplingStrategy(size, cuts_k) if size < self._held // 2 else TOGETHER

    def _draw(self, logits_RV: Tensor, requests: list[Request], way: SamplingStrategy) -> SampledRows:
        logits_RV, shared = logits_RV[:, : self._held], TPDraw(self._rank.collective, self._part)
        if way == GREEDY:
            return shared.greedy(logits_RV)
        logits_RV, knobs = logits_RV.float(), self._whole.knobs(requests)
        if not way.size:
            return shared.whole(logits_RV, knobs)
        return shared.among_best(logits_RV, knobs, way.size, cuts_k=way.cuts_k)

    def _gather(self, logits_RV: Tensor) -> Tensor:
        """Gather rows: [R, whole vocabulary and padding]."""
        return self._rank.collective.gather(logits_RV).transpose(0, 1).flatten(1)


class NullSampler:
    """`TokenSampler` of a stage without logits; its results are not used."""

    def sample(self, _logits: Tensor, requests: Sequence[Request]) -> list[Pick]:
        return ["sampled in another stage"] * len(requests)

    def prompt_logprobs(self, _logits: Tensor, _next_ids: Sequence[int], _top: int) -> list[TokenLogprobs]:
        return []
