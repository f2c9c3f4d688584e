"""Verification of draft tokens: sample the accepted drafts of each request, and one more token.

A step computes a request's last token and the drafts after it, one row each. Row j has the logits after j
drafts. Its token is sampled only once these j drafts equal the sampled tokens, and with the request's state
after them: counts, bad words, `min_tokens`, the grammar's mask, the noise of that position. So it is the
token that a separate step would have sampled, bit by bit, where rows do not depend on the rows beside them
(`Ops.row_invariant`). There is no random acceptance as in Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", 2023: noise is a function of seed and position, so each position has one right
token, and a draft either equals it or does not.

S sampling rows of the step, ordered by rounds: first the rows before any draft, then those after one draft,
etc.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import islice

from torch import Tensor

from ..core.request import Request
from ..core.step import SampledToken, ScheduledRequest, StepPlan, StepResult, finish_reason, is_stop
from ..sampling import Sampler
from ..sampling.sampler import BROKEN

DOUBTFUL = "NaN or infinity in a row of this request or of a draft"


def is_decoding(plan: StepPlan, *, is_recurrent: bool) -> bool:
    """Return True if all rows continue sequences. `is_recurrent`: layers take the rows of a sequence one
    after another, so that drafts are computed as prompts are.
    """
    if is_recurrent and plan.num_tokens > len(plan.rows):
        return False
    return all(row.samples and row.num_tokens == 1 + len(row.drafts) for row in plan.rows)


def group_by_draft_position(rows: Sequence[ScheduledRequest]) -> list[list[ScheduledRequest]]:
    """Group sampling rows by draft position: round j holds the requests with at least j drafts."""
    sampling = [row for row in rows if row.samples]
    most = max((len(row.drafts) for row in sampling), default=0)
    return [sampling, *([row for row in sampling if len(row.drafts) >= j] for j in range(1, most + 1))]


def requests_with_nan(hidden_SE: Tensor, rounds: Sequence[Sequence[ScheduledRequest]]) -> set[Request]:
    """Return the requests with drafts that have a row with NaN or infinity.

    Attention multiplies masked values by zero, so a NaN of a wrong draft would reach valid rows. Without
    drafts such a request may succeed.
    """
    if len(rounds) == 1:
        return set()
    drafted = {row.request for row in rounds[1]}
    finite_S = hidden_SE.float().sum(1).isfinite().tolist()
    requests = (row.request for rows in rounds for row in rows)
    return {request for request, fine in zip(requests, finite_S, strict=True) if not fine} & drafted


def verify_drafts(
    sampler: Sampler,
    logits_SV: Tensor,
    rounds: Sequence[Sequence[ScheduledRequest]],
    doubtful: AbstractSet[Request] = frozenset(),
) -> StepResult:
    """Sample the rounds of `group_by_draft_position`; the result has each request's tokens, or why it has
    none.
    """
    if len(rounds) == 1:
        return result_of(rounds[0], sampler.sample(logits_SV, [row.request for row in rounds[0]]))
    result = StepResult(failed=dict.fromkeys((request.request_id for request in doubtful), DOUBTFUL))
    first, going = 0, {row.request for row in rounds[0]} - doubtful
    with _restoring_token_ids(rounds[1] if len(rounds) > 1 else ()):
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


def result_of(rows: Sequence[ScheduledRequest], picks: Iterable[SampledToken | str]) -> StepResult:
    """Build the result of rows without drafts from what `Sampler.sample` returned for them."""
    result = StepResult()
    for row, pick in zip(rows, picks, strict=True):
        if isinstance(pick, str):
            result.failed[row.request.request_id] = pick
        else:
            result.tokens[row.request.request_id] = pick
    return result


def _take(result: StepResult, row: ScheduledRequest, depth: int, pick: SampledToken | str) -> bool:
    """Record a sampled token. True: the draft is accepted and the request updated, so the next row can be
    sampled.
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
    if row.draft_masks:
        request.mask = row.draft_masks[depth] if depth < len(row.draft_masks) else None
    else:
        request.update_mask()
    return True


def accept_drafts(rows: Sequence[ScheduledRequest], picks: Iterable[SampledToken | str]) -> StepResult:
    """Return the result of rows that were all sampled on the assumption that their drafts are right.

    `picks`: a token or an error for each row from the last known token on, request by request.
    """
    result, left = StepResult(), iter(picks)
    for row in rows:
        name, own = row.request.request_id, list(islice(left, 1 + len(row.drafts)))
        if row.drafts and BROKEN in own:
            result.failed[name] = DOUBTFUL
            continue
        if isinstance(own[0], str):
            result.failed[name] = own[0]
            continue
        taken, outputs = [own[0]], row.start + 1 - row.request.num_prompt
        for draft, pick in zip(row.drafts, own[1:], strict=True):
            token = taken[-1].token_id
            # After an error the next step fails, as it begins there.
            if token != draft or isinstance(pick, str) or is_stop(row.request, token, outputs + len(taken)):
                break
            taken.append(pick)
        result.tokens[name] = taken[-1]
        if len(taken) > 1:
            result.accepted[name] = taken[:-1]
    return result


@contextmanager
def _restoring_token_ids(rows: Sequence[ScheduledRequest]) -> Iterator[None]:
    """Restore the token ids of these requests on exit: the scheduler appends tokens after the step."""
    sizes = [(row.request.token_ids, row.request.num_tokens) for row in rows]
    try:
        yield
    finally:
        for token_ids, size in sizes:
            del token_ids[size:]


@contextmanager
def drafting(wanted: Sequence[tuple[Request, int]]) -> Iterator[bool]:
    """Let these requests take drafts as tokens, and their grammars follow these; at exit all is as before.
    Yields whether a grammar limits any of them.
    """
    kept = [(each, each.mask, each.constraint, each.num_tokens, each.num_pending) for each, _ in wanted]
    limited = [each for each, _ in wanted if each.constraint is not None and each.constraint.has_grammar]
    try:
        for request, _ in wanted:
            request.mask = None  # of the token before
        for request in limited:
            request.update_mask()
            request.constraint = request.constraint.fork() if request.constraint else None
        yield bool(limited)
    finally:
        for request, mask, constraint, size, pending in kept:
            request.mask, request.constraint, request.num_pending = mask, constraint, pending
            del request.token_ids[size:]


def _rows(logits_SV: Tensor, places: Sequence[int]) -> Tensor:
    """Select rows; a view where they are contiguous, as in the first round."""
    if places[-1] - places[0] + 1 == len(places):
        return logits_SV[places[0] : places[-1] + 1]
    return logits_SV[list(places)]
