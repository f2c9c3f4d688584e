"""When a sequence is complete, as far as token ids tell, and what its owner is told.

Stop strings are the daemon's business: it knows the text.
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


def add_up(sums: list[int], more: Iterable[int]) -> None:
    """`more` into `sums`, which may be empty yet."""
    sums[:] = map(operator.add, sums, more) if sums else more


def as_vector(sums: Sequence[int], rows: int) -> bytes:
    """Their mean over so many rows, as little-endian float32."""
    vector = array("f", (units * UNIT / rows for units in sums))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


def finish_reason(request: Request) -> str | None:
    """`stop`, `length` or None. Admission proved prompt + max_tokens <= context: that limit needs no rule."""
    if request.pools:
        return None
    params, outputs = request.params, request.num_output
    # The sampler forbids stop tokens among the first `min_tokens`.
    if request.token_ids[-1] in params.stop_token_ids and outputs > params.min_tokens:
        return "stop"
    return "length" if outputs >= params.max_tokens else None


def token_answer(request: Request, sampled: Sequence[SampledToken], reason: str | None) -> RequestOutput:
    """For the tokens just appended; the first answer takes along what is told once."""
    ids = [each.token_id for each in sampled]
    answer = RequestOutput(request_id=request.request_id, token_ids=ids, finish_reason=reason)
    if sampled[0].logprobs is not None:
        answer.logprobs = [each.logprobs for each in sampled if each.logprobs is not None]
    if reason == "stop":
        answer.stop_token_id = ids[-1]
    if not request.answered:
        _tell_first(request, answer)
        if request.params.prompt_logprobs is not None and request.num_output == len(ids):
            answer.prompt_logprobs = [None, *request.prompt_logprobs]
    return answer


def pooled_answer(request: Request) -> RequestOutput:
    """The vector of the whole prompt, whose sums are there."""
    rows = request.num_prompt if request.params.pooling == "mean" else 1
    vector = as_vector(request.pooled, rows)
    answer = RequestOutput(request_id=request.request_id, finish_reason="stop", vector=vector)
    _tell_first(request, answer)
    return answer


def _tell_first(request: Request, answer: RequestOutput) -> None:
    request.answered = True
    answer.cached_tokens = request.num_cached
    answer.looked_up_tokens = request.num_looked_up
    answer.prefix_end = request.prefix_end
    answer.scheduled_at = request.scheduled_at


def error_answer(request_id: str, code: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error_code=code, error_message=message)


def failed_answer(request: Request, message: str) -> RequestOutput:
    """To a row that gave no token, for the reason that the sampler tells or for one that is behind it."""
    problem = None if request.constraint is None else request.constraint.problem
    if problem is not None:
        return error_answer(request.request_id, GrammarError.code, problem)
    return error_answer(request.request_id, "invalid_logits", message)
