"""Validation of requests that arrive at the engine: the last check before the scheduler and the kernels.

The daemon validates requests for its clients. A bad value that gets past it must end one request with an
error and never the engine. The bounds are those of the sampler and the kernels, not those of the API.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from ..errors import InvalidRequest
from ..ipc.messages import AddRequest, ModelInfo
from ..sampling_params import SamplingParams

_INTEGERS: Final = range(-(2**31), 2**31)
"""Range of token ids and counts: 32 bits. Ids in logit_bias, bad_words and the like may be outside the
vocabulary and are then ignored."""
_SEEDS: Final = range(-(2**63), 2**64)
_POOLINGS: Final = ("last", "mean", "cls")


def check_request(message: AddRequest, info: ModelInfo) -> None:
    """Raise InvalidRequest for the first value that the engine cannot compute with."""
    problem = next(_problems(message, info), None)
    if problem is not None:
        raise InvalidRequest(problem)


def _problems(message: AddRequest, info: ModelInfo) -> Iterator[str]:
    if not message.prompt_ids:
        yield "the prompt has no tokens"
    for name, ids in (("prompt", message.prompt_ids), ("output so far", message.output_ids)):
        low, high = min(ids, default=0), max(ids, default=0)
        if ids and not 0 <= low <= high < info.vocab_size:
            wrong = low if low < 0 else high
            yield f"token id {wrong} of the {name} is not in the model's vocabulary of {info.vocab_size}"
    params = message.params
    yield from _counts(params)
    yield from _ranges(params)
    yield from _ids(params)
    if params.pooling is not None:
        yield from _pooling(message, info)
    elif not info.generates:
        yield "this model makes vectors and no text"


def _counts(params: SamplingParams) -> Iterator[str]:
    counts = {
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "top_k": params.top_k,
        "logprobs": params.logprobs or 0,
        "prompt_logprobs": params.prompt_logprobs or 0,
    }
    for name, value in counts.items():
        if not 0 <= value < _INTEGERS.stop:
            yield f"{name} is {value}, allowed are 0 to {_INTEGERS.stop - 1}"
    if params.seed not in _SEEDS:
        yield "the seed has more than 64 bits"


def _ranges(params: SamplingParams) -> Iterator[str]:
    ranges = (
        ("temperature", params.temperature, 0.0, math.inf),
        ("top_p", params.top_p, 0.0, math.inf),
        ("min_p", params.min_p, 0.0, 1.0),
        ("repetition_penalty", params.repetition_penalty, math.ulp(0.0), math.inf),
        ("presence_penalty", params.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", params.frequency_penalty, -math.inf, math.inf),
    )
    for name, value, low, high in ranges:
        if not (math.isfinite(value) and low <= value <= high):
            yield f"{name} is {value}"
    if not all(map(math.isfinite, params.logit_bias.values())):
        yield "a value of logit_bias is not a finite number"


def _ids(params: SamplingParams) -> Iterator[str]:
    listed: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", (id_ for word in params.bad_words for id_ in word)),
    )
    for name, ids in listed:
        if any(id_ not in _INTEGERS for id_ in ids):
            yield f"{name} holds a number that is no token id"


def _pooling(message: AddRequest, info: ModelInfo) -> Iterator[str]:
    params = message.params
    is_encoder = info.pooling in {"embed", "classify"}
    known = (info.pooling,) if is_encoder else _POOLINGS
    if params.pooling not in known:
        yield f"pooling {params.pooling!r} is not known of this model, only {', '.join(known)}"
    if params.pair_start is not None and not 0 < params.pair_start <= len(message.prompt_ids):
        yield f"pair_start {params.pair_start} is not within the {len(message.prompt_ids)} tokens"
    if info.pooling_problem:
        yield f"this model makes no vectors: {info.pooling_problem}"
    if params.max_tokens or message.output_ids:
        yield "a request for a vector has no output"
    if params.grammar is not None or params.logprobs is not None or params.prompt_logprobs is not None:
        yield "a request for a vector has neither a grammar nor log-probabilities"
