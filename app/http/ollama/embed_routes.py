"""Embedding routes of the Ollama dialect: `/api/embed`, and the older `/api/embeddings` for one text."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Response, post
from litestar.params import Body
from litestar.types import ControllerRouterHandler
from msgspec import UNSET, Struct, UnsetType

from ...engines.loaded_model import LoadedModel
from ...gateway.embeddings import unit_vector
from ...gateway.gateway import model_limit
from ...util.threads import off_loop
from ..auth.guard import Access
from ..openai.completions import prompt_ids
from ..openai.embeddings import Pooled, build_pooling_generation, check_dimensions, check_inputs, pool
from ..openai.request_context import HttpRequest, RequestContext
from ..openai.sampling import public_id
from ..openai.unsupported import unknown_fields
from ..server.sse import while_connected
from .keep_alive import keep_for, load_or_unload, seconds_of
from .request_types import EmbedCommon, EmbeddingsRequest, EmbedRequest, normalize_name


class Embedded(Struct, kw_only=True):
    """Answer of `/api/embed`. Times are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    warnings: list[str] | UnsetType = UNSET


class EmbeddedOne(Struct, kw_only=True):
    embedding: list[float]
    warnings: list[str] | UnsetType = UNSET


Told = Callable[[list[list[float]], Pooled | None, list[str]], Struct]
"""The answer of a route: vectors, what they came from (None where nothing was asked), warnings."""


@post(
    "/api/embed",
    status_code=200,
    opt={"access": Access.INFER},
    name="ollama_embed",
    operation_id="ollamaEmbed",
)
async def ollama_embed(request: HttpRequest, data: Annotated[EmbedRequest, Body()]) -> Response[Embedded]:
    """Return a vector of length 1 for each text."""
    began = time.monotonic()

    def build_answer(vectors: list[list[float]], pooled: Pooled | None, warnings: list[str]) -> Embedded:
        return Embedded(
            model=data.model,
            embeddings=vectors,
            total_duration=round((time.monotonic() - began) * 1e9),
            prompt_eval_count=0 if pooled is None else pooled.usage.prompt_tokens,
            warnings=warnings or UNSET,
        )

    texts = [data.input] if isinstance(data.input, str) and data.input else data.input or []
    return await _answered(request, data, list(texts), "input", build_answer)


@post(
    "/api/embeddings",
    status_code=200,
    opt={"access": Access.INFER},
    name="ollama_embeddings",
    operation_id="ollamaEmbeddings",
)
async def ollama_embeddings(
    request: HttpRequest, data: Annotated[EmbeddingsRequest, Body()]
) -> Response[EmbeddedOne]:
    """Return a vector of length 1 for one text: the older route."""

    def build_answer(vectors: list[list[float]], _pooled: Pooled | None, warnings: list[str]) -> EmbeddedOne:
        return EmbeddedOne(embedding=vectors[0] if vectors else [], warnings=warnings or UNSET)

    return await _answered(request, data, [data.prompt] if data.prompt else [], "prompt", build_answer)


async def _answered(
    request: HttpRequest,
    data: EmbedRequest | EmbeddingsRequest,
    texts: list[str],
    param: str,
    build_answer: Told,
) -> Response[Any]:
    call = await RequestContext.of(request)
    control, warnings = request.app.state.control, _warnings(call, data)
    if not texts:
        _, more = await load_or_unload(control, call, normalize_name(data.model), data.keep_alive)
        return Response(build_answer([], None, warnings + more))
    dimensions = data.dimensions if isinstance(data, EmbedRequest) else None
    with call.recording_refusals():
        seconds = seconds_of(data.keep_alive)
        check_inputs(texts, param)
        model = await call.find_model(normalize_name(data.model))
        check_dimensions(dimensions, model)
        reservation = call.reserve(model, len(texts), pools=True)
        prompts = await prompt_ids(texts, param, model, special=True)
        if isinstance(data, EmbedRequest) and data.truncate:
            warnings += await _truncate(prompts, texts, model)
    if seconds is not None:
        warnings += keep_for(control, call.caller, model.name, seconds)
    id_ = public_id("embd", None, call.exchange, call.gateway)
    generation = build_pooling_generation(
        call, model, prompts, id_=id_, reservation=reservation, prompt_param=param
    )
    pooled = await while_connected(request.receive, pool(call.gateway, generation))

    def encoded() -> bytes:
        vectors = [unit_vector(raw, dimensions).tolist() for raw in pooled.vectors]
        return msgspec.json.encode(build_answer(vectors, pooled, warnings))

    answer = await off_loop(sum(map(len, pooled.vectors)), encoded)
    return Response(answer, media_type="application/json")


async def _truncate(prompts: list[list[int]], texts: list[str], model: LoadedModel) -> list[str]:
    """Cut prompts that exceed the context at their end, in place. Returns warnings that say so."""
    limit = model_limit(model)
    warnings = []
    for i, ids in enumerate(prompts):
        if len(ids) > limit:
            prompts[i] = await model.text.off_loop(
                len(texts[i]), partial(model.text.encode_start, texts[i], limit)
            )
            warnings.append(f"'input[{i}]' was cut from {len(ids)} tokens to the context of {limit}.")
    return warnings


def _warnings(call: RequestContext, data: EmbedCommon) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    if any(value is not None for value in (data.options or {}).values()):
        found.append("'options' have no effect on embeddings.")
    return found


embed_routes: list[ControllerRouterHandler] = [ollama_embed, ollama_embeddings]
