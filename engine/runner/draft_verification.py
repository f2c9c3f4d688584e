"""Draws the tokens of a step whose requests have drafts: as many tokens as come true, and one more.

A step computes a request's last token and the drafts after it, a row each. Row j's logits are those after
the tokens before it and j drafts. Its token is drawn only once these drafts are known to be the tokens that
were drawn, and with the request as it is after them: counts, bad words, `min_tokens`, the grammar's mask, the
noise of that position. So it is the token that a step of its own would have drawn, bit by bit, where rows do
not depend on the rows beside them (`Ops.row_invariant`). Nothing is accepted or rejected by chance, as in
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023: noise is a function of
seed and position, so there is one right token at each position, and a draft is it or is not.

S sampling rows of the step: in rounds, the first of each request, then the rows after one draft, and so on.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from ..core.outputs import finish_reason
from ..core.request import Request
from ..core.step import SampledToken, ScheduledRequest, StepResult

DOUBTFUL = "NaN or infinity in a row of this request or of a draft"


class Sampling(Protocol):
    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[SampledToken | str]: ...


def rounds_of(rows: Sequence[ScheduledRequest]) -> list[list[ScheduledRequest]]:
    """Round j: those with at least j drafts."""
    sampling = [row for row in rows if row.samples]
    most = max((len(row.drafts) for row in sampling), default=0)
    return [sampling, *([row for row in sampling if len(row.drafts) >= j] for j in range(1, most + 1))]


def broken(hidden_SE: Tensor, rounds: Sequence[Sequence[ScheduledRequest]]) -> set[Request]:
    """Those of which a row is not finite, and that have drafts: attention multiplies what it must not see by
    zero, so a wrong guess would reach the tokens. Without drafts they may be well.
    """
    if len(rounds) == 1:
        return set()
    drafted = {row.request for row in rounds[1]}
    finite_S = hidden_SE.float().sum(1).isfinite().tolist()
    requests = (row.request for rows in rounds for row in rows)
    return {request for request, fine in zip(requests, finite_S, strict=True) if not fine} & drafted


def draw(
    sampler: Sampling,
    logits_SV: Tensor,
    rounds: Sequence[Sequence[ScheduledRequest]],
    doubtful: AbstractSet[Request] = frozenset(),
) -> StepResult:
    """`rounds` as `rounds_of` gives them; of each row that samples its tokens, or why it has none."""
    result = StepResult(failed=dict.fromkeys((request.request_id for request in doubtful), DOUBTFUL))
    first, going = 0, {row.request for row in rounds[0]} - doubtful
    with _as_before(rounds[1] if len(rounds) > 1 else ()):
        for depth, rows in enumerate(rounds):
            drawn = [(first + place, row) for place, row in enumerate(rows) if row.request in going]
            first += len(rows)
            if not drawn:
                break
            logits_RV = _rows(logits_SV, [place for place, _ in drawn])
            picks = sampler.sample(logits_RV, [row.request for _, row in drawn])
            for (_, row), pick in zip(drawn, picks, strict=True):
                if not _take(result, row, depth, pick):
                    going.discard(row.request)
    return result


def _take(result: StepResult, row: ScheduledRequest, depth: int, pick: SampledToken | str) -> bool:
    """Into the result. True: the draft came true, so the next row's token may be drawn, and the request is as
    it must be for that.
    """
    name, request = row.request.request_id, row.request
    if isinstance(pick, str):
        if depth == 0:
            result.failed[name] = pick
        return False  # after accepted tokens: the next step fails, as it begins there
    if depth:
        result.accepted.setdefault(name, []).append(result.tokens[name])
    result.tokens[name] = pick
    if depth == len(row.drafts) or pick.token_id != row.drafts[depth]:
        return False
    request.token_ids.append(pick.token_id)
    if finish_reason(request) is not None:
        return False
    request.renew_mask()
    return True


@contextmanager
def _as_before(rows: Sequence[ScheduledRequest]) -> Iterator[None]:
    """What these requests are given meanwhile is taken back: the scheduler gives them their tokens, once the
    step is done.
    """
    sizes = [(row.request.token_ids, row.request.num_tokens) for row in rows]
    try:
        yield
    finally:
        for token_ids, size in sizes:
            del token_ids[size:]


def _rows(logits_SV: Tensor, places: Sequence[int]) -> Tensor:
    """A view where they lie together, as the first round's do."""
    if places[-1] - places[0] + 1 == len(places):
        return logits_SV[places[0] : places[-1] + 1]
    return logits_SV[list(places)]
