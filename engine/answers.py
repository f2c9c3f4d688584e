"""When a sequence is complete, as far as token ids tell, and what its owner is told.

Stop strings are the daemon's business: it knows the text.
"""

from .messages import RequestOutput
from .request import Request
from .step import SampledToken


def finish_reason(request: Request) -> str | None:
    """`stop`, `length` or None. Admission proved prompt + max_tokens <= context: that limit needs no rule."""
    if stop_token(request) is not None:
        return "stop"
    if request.num_output >= request.params.max_tokens:
        return "length"
    return None


def stop_token(request: Request) -> int | None:
    """The last token, if it ends the sequence. The sampler forbids it among the first `min_tokens`."""
    last = request.token_ids[-1]
    allowed = request.num_output > request.params.min_tokens
    return last if allowed and last in request.params.stop_token_ids else None


def token_answer(request: Request, sampled: SampledToken, reason: str | None) -> RequestOutput:
    """For the token just appended; the first answer takes along what is told once."""
    logprobs = None if sampled.logprobs is None else [sampled.logprobs]
    stop_id = stop_token(request) if reason == "stop" else None
    if request.answered:
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[sampled.token_id],
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=stop_id,
        )
    request.answered = True
    wants_prompt = request.params.prompt_logprobs is not None and request.num_output == 1
    return RequestOutput(
        request_id=request.request_id,
        token_ids=[sampled.token_id],
        logprobs=logprobs,
        prompt_logprobs=[None, *request.prompt_logprobs] if wants_prompt else None,
        finish_reason=reason,
        stop_token_id=stop_id,
        cached_tokens=request.num_cached,
        scheduled_at=request.scheduled_at,
    )


def error_answer(request: Request, code: str, message: str) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id, finish_reason="error", error_code=code, error_message=message
    )
