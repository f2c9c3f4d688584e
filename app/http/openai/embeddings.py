"""POST /v1/embeddings: one vector of length 1 for each text, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET

from llmbox.engine.sampling_params import Pooling, SamplingParams

from ...engines.admission import QueueReservation
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.choice_stream import as_base64, unit_vector
from ...gateway.gateway import Gateway
from ...gateway.generation import Generation, TokenUsage
from ...util.threads import off_loop
from .completions import prompt_ids, prompt_items, truncate_prompts
from .prepared_request import Deadlines
from .request_context import RequestContext
from .request_types import EmbeddingRequest
from .response_types import Embedding, EmbeddingList, EmbeddingUsage
from .sampling import invalid, public_id
from .unsupported import refuse_unsupported

MAX_INPUTS: Final = 2048
"""OpenAI's limit."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """Pooled output of the engine for each prompt, as in `Delta.vector`."""

    vectors: list[bytes]
    usage: TokenUsage


async def prepare_embeddings(call: RequestContext, body: EmbeddingRequest) -> Generation:
    """Check an embedding request and build its generation. Raises ApiError for every error that can be found
    before the engine has the request.
    """
    refuse_unsupported(body)
    items = prompt_items(body.input, "input")
    check_inputs(items, "input")
    model = await call.find_model(body.model, Deadlines.of(call).next)
    check_dimensions(body.dimensions, model)
    special = body.add_special_tokens is not False
    reservation = call.reserve(model, len(items), pools=True)
    prompts = await prompt_ids(items, "input", model, special=special)
    prompts, _ = truncate_prompts(prompts, body.truncate_prompt_tokens, None, model)
    return build_pooling_generation(
        call,
        model,
        prompts,
        id_=public_id("embd", body.request_id, call.exchange, call.gateway),
        reservation=reservation,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
    )


def check_inputs(items: Sequence[str | list[int]], param: str) -> None:
    """Check the inputs without a model. Raises ApiError 400."""
    if len(items) > MAX_INPUTS:
        raise invalid(param, f"at most {MAX_INPUTS} inputs can be sent at once, these are {len(items)}")
    for i, item in enumerate(items):
        if not item:
            raise invalid(param if len(items) == 1 else f"{param}[{i}]", "it must not be empty")


def check_dimensions(dimensions: int | None, model: LoadedModel) -> None:
    """Check `dimensions` against the model. Raises ApiError 400."""
    info = model.supervisor.info
    assert info is not None
    if dimensions is not None and dimensions > info.hidden_size:
        raise invalid("dimensions", f"this model's vectors have {info.hidden_size}, not {dimensions}")


def build_pooling_generation(
    call: RequestContext,
    model: LoadedModel,
    prompts: list[list[int]],
    *,
    id_: str,
    reservation: QueueReservation,
    priority: int | None = None,
    cache_salt: str = "",
    prompt_param: str = "input",
) -> Generation:
    """Build a pooling generation as the model's folder declares it. Raises ApiError 400."""
    info = model.supervisor.info
    assert info is not None
    if info.pooling_problem:
        raise ApiError(
            400,
            f"{model.name} cannot make embeddings: {info.pooling_problem}.",
            code="embeddings_not_supported",
            param="model",
        )
    return pooled(call, model, prompts, info.pooling, id_, reservation, priority, cache_salt, prompt_param)


def pooled(
    call: RequestContext,
    model: LoadedModel,
    prompts: list[list[int]],
    pooling: Pooling,
    id_: str,
    reservation: QueueReservation,
    priority: int | None,
    cache_salt: str,
    prompt_param: str,
) -> Generation:
    return Generation(
        id=id_,
        model=model,
        prompts=prompts,
        params=SamplingParams(max_tokens=0, pooling=pooling),
        **call.caller_fields(priority, cache_salt),
        reservation=reservation,
        prompt_param=prompt_param,
    )


async def pool(gateway: Gateway, generation: Generation) -> Pooled:
    """Run the generation and collect its pooled output. Raises ApiError."""
    vectors = [b""] * len(generation.prompts)
    with gateway.open(generation) as opened:
        async for delta in opened.deltas():
            assert delta.vector is not None
            vectors[delta.index] = delta.vector
    return Pooled(vectors, opened.usage)


async def embed(
    gateway: Gateway, generation: Generation, body: EmbeddingRequest, warnings: list[str]
) -> bytes:
    """Return the answer's JSON. Thousands of vectors are megabytes of it, so it is encoded off the event
    loop.
    """
    pooled = await pool(gateway, generation)
    name = body.model or generation.model.name
    size = sum(map(len, pooled.vectors))
    return await off_loop(size, lambda: msgspec.json.encode(_answer(pooled, body, name, warnings)))


def _answer(pooled: Pooled, body: EmbeddingRequest, name: str, warnings: list[str]) -> EmbeddingList:
    data = []
    for index, raw in enumerate(pooled.vectors):
        vector = unit_vector(raw, body.dimensions)
        told = as_base64(vector) if body.encoding_format == "base64" else vector.tolist()
        data.append(Embedding(index=index, embedding=told))
    tokens = pooled.usage.prompt_tokens
    return EmbeddingList(
        data=data, model=name, usage=EmbeddingUsage(tokens, tokens), warnings=warnings or UNSET
    )
