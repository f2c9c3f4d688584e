"""Outputs of requests, and the finish reasons that token ids decide.

Stop strings are checked by the daemon, which knows the text.
"""

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from ..errors import GrammarError
from ..ipc.messages import RequestOutput
from .request import Request
from .step import SampledToken

UNIT: Final = 2.0**-30
"""Fixed-point unit of pooled sums: they are integers, so that their order does not matter."""


def add_up(sums: list[int], more: Iterable[int]) -> None:
    """Add `more` to `sums` in place, element by element; empty `sums` count as zeros."""
    sums[:] = map(operator.add, sums, more) if sums else more


def as_vector(sums: Sequence[int], rows: int) -> bytes:
    """Return the mean of `rows` rows from their fixed-point sums, as little-endian float32 bytes."""
    vector = array("f", (units * UNIT / rows for units in sums))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


def finish_reason(request: Request) -> str | None:
    """Return `stop`, `length`, or None for a request that continues.

    The context limit needs no check: admission has proved prompt + max_tokens <= context.
    """
    if request.pools:
        return None
    outputs = request.num_output
    if is_stop(request, request.token_ids[-1], outputs):
        return "stop"
    return "length" if outputs >= request.params.max_tokens else None


def is_stop(request: Request, token: int, outputs: int) -> bool:
    """Return True if the token ends a request that has so many output tokens with it."""
    # The sampler bans stop tokens among the first `min_tokens`.
    return token in request.params.stop_token_ids and outputs > request.params.min_tokens


def make_token_output(
    request: Request, sampled: Sequence[SampledToken], reason: str | None, drafts: Sequence[int] = ()
) -> RequestOutput:
    """Make the output for the tokens just appended; the first one also has the fields that are sent once.

    `drafts`: tokens that the step verified.
    """
    ids = [each.token_id for each in sampled]
    answer = RequestOutput(request_id=request.request_id, token_ids=ids, finish_reason=reason)
    if sampled[0].logprobs is not None:
        answer.logprobs = [each.logprobs for each in sampled if each.logprobs is not None]
    if reason == "stop":
        answer.stop_token_id = ids[-1]
    if drafts:
        answer.draft_tokens, answer.accepted_tokens = len(drafts), count_accepted(ids, drafts)
    if not request.first_output_sent:
        _add_first_output_fields(request, answer)
        if request.params.prompt_logprobs is not None and request.num_output == len(ids):
            answer.prompt_logprobs = [None, *request.prompt_logprobs]
    return answer


def count_accepted(ids: Sequence[int], drafts: Sequence[int]) -> int:
    """Return how many drafts the tokens that came out of their step are."""
    return sum(map(operator.eq, ids, drafts))


def make_pooling_output(request: Request) -> RequestOutput:
    """Make the output of a pooling request from the sums over its whole prompt."""
    rows = request.num_prompt if request.params.pooling == "mean" else 1
    vector = as_vector(request.pooled, rows)
    answer = RequestOutput(request_id=request.request_id, finish_reason="stop", vector=vector)
    _add_first_output_fields(request, answer)
    return answer


def _add_first_output_fields(request: Request, answer: RequestOutput) -> None:
    request.first_output_sent = True
    answer.cached_tokens = request.num_cached
    answer.disk_tokens = request.num_disk
    answer.host_tokens = request.num_host
    answer.looked_up_tokens = request.num_prefix_lookup_tokens
    answer.prefix_end = request.prefix_end
    answer.scheduled_at = request.scheduled_at


def make_error_output(request_id: str, code: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error_code=code, error_message=message)


def make_failure_output(request: Request, message: str) -> RequestOutput:
    """Make the error output of a row without a token. A grammar's problem takes precedence over the sampler's
    `message`, because it is the cause.
    """
    problem = None if request.constraint is None else request.constraint.problem
    if problem is not None:
        return make_error_output(request.request_id, GrammarError.code, problem)
    return make_error_output(request.request_id, "invalid_logits", message)
