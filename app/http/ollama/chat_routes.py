"""Chat, generate and embedding routes of the Ollama dialect, and the list of all its routes."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Response, Router
from litestar.params import Body
from litestar.types import ControllerRouterHandler
from msgspec import UNSET, Struct, UnsetType

from ...engines.loaded_model import LoadedModel
from ...gateway.choice_stream import unit_vector
from ...gateway.gateway import model_limit
from ...util.threads import off_loop
from ..openai.completions import prompt_ids, with_prompt
from ..openai.embeddings import (
    PooledPrompts,
    PoolingFields,
    build_pooling_generation,
    check_dimensions,
    check_inputs,
    pool,
)
from ..openai.request_context import RequestContext, inference_route
from ..openai.unsupported import unknown_fields
from ..server.request import StrictRequest
from ..server.sse import EventStreamResponse, while_connected
from .calls import find_warnings, keep_for, load_or_unload, prepare_ollama, seconds_of
from .model_routes import library_routes, model_routes
from .request_types import (
    ChatRequest,
    EmbedCommon,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaGenerateFields,
    normalize_name,
)
from .responder import LINES, Kind, build_empty_answer, complete, stream


class OllamaEmbedResponse(Struct, kw_only=True):
    """Answer of `/api/embed`. Times are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    warnings: list[str] | UnsetType = UNSET


class OllamaEmbeddingResponse(Struct, kw_only=True):
    embedding: list[float]
    warnings: list[str] | UnsetType = UNSET


AnswerBuilder = Callable[[list[list[float]], PooledPrompts | None, list[str]], Struct]
"""The answer of a route: vectors, what they came from (None where the prompt is empty), warnings."""


@inference_route("/api/embed", "ollamaEmbed")
async def ollama_embed(
    request: StrictRequest, data: Annotated[EmbedRequest, Body()]
) -> Response[OllamaEmbedResponse]:
    """Return a vector of length 1 for each text."""
    began = time.monotonic()

    def build_answer(
        vectors: list[list[float]], pooled: PooledPrompts | None, warnings: list[str]
    ) -> OllamaEmbedResponse:
        return OllamaEmbedResponse(
            model=data.model,
            embeddings=vectors,
            total_duration=round((time.monotonic() - began) * 1e9),
            prompt_eval_count=0 if pooled is None else pooled.usage.prompt_tokens,
            warnings=warnings or UNSET,
        )

    texts = [data.input] if isinstance(data.input, str) and data.input else data.input or []
    return await _answer_embeddings(request, data, list(texts), "input", build_answer)


@inference_route("/api/embeddings", "ollamaEmbeddings")
async def ollama_embeddings(
    request: StrictRequest, data: Annotated[EmbeddingsRequest, Body()]
) -> Response[OllamaEmbeddingResponse]:
    """Return a vector of length 1 for one text: the older route."""

    def build_answer(
        vectors: list[list[float]], _pooled: PooledPrompts | None, warnings: list[str]
    ) -> OllamaEmbeddingResponse:
        return OllamaEmbeddingResponse(embedding=vectors[0] if vectors else [], warnings=warnings or UNSET)

    return await _answer_embeddings(
        request, data, [data.prompt] if data.prompt else [], "prompt", build_answer
    )


async def _answer_embeddings(
    request: StrictRequest,
    data: EmbedRequest | EmbeddingsRequest,
    texts: list[str],
    param: str,
    build_answer: AnswerBuilder,
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
        texts = await with_prompt(texts, model)
        reservation = call.reserve(model, len(texts), pools=True)
        prompts = await prompt_ids(texts, param, model, special=True)
        if isinstance(data, EmbedRequest) and data.truncate:
            warnings += await _truncate(prompts, texts, model)
    if seconds is not None:
        warnings += keep_for(control, call.caller, model.name, seconds)
    generation = build_pooling_generation(
        call, PoolingFields(), model, prompts, reservation, prefix="embd", prompt_param=param
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


@inference_route("/api/chat", "ollamaChat")
async def ollama_chat(
    request: StrictRequest, data: Annotated[ChatRequest, Body()]
) -> Response[dict[str, Any]]:
    """Generate the model's next message in Ollama's shape; lines of JSON unless `stream` is false."""
    call = await RequestContext.of(request)
    if not data.messages:
        return await _answer_without_prompt(request, call, "chat", data)
    return await _answer_prompt(request, call, "chat", data)


@inference_route("/api/generate", "ollamaGenerate")
async def ollama_generate(
    request: StrictRequest, data: Annotated[GenerateRequest, Body()]
) -> Response[dict[str, Any]]:
    """Generate the model's answer to one prompt; lines of JSON unless `stream` is false."""
    call = await RequestContext.of(request)
    if not (data.prompt or data.suffix):
        return await _answer_without_prompt(request, call, "generate", data)
    return await _answer_prompt(request, call, "generate", data)


async def _answer_without_prompt(
    request: StrictRequest, call: RequestContext, kind: Kind, data: OllamaGenerateFields
) -> Response[dict[str, Any]]:
    """Answer a request without a prompt: load the model, or unload it where `keep_alive` is 0."""
    control = request.app.state.control
    done, more = await load_or_unload(control, call, normalize_name(data.model), data.keep_alive)
    warnings = find_warnings(call, data) + more
    return Response(build_empty_answer(kind, data.model, time.time(), done, warnings))


async def _answer_prompt(
    request: StrictRequest, call: RequestContext, kind: Kind, data: ChatRequest | GenerateRequest
) -> Response[dict[str, Any]]:
    with call.recording_refusals():
        seconds = seconds_of(data.keep_alive)
        asked = await prepare_ollama(call, data)
    if seconds is not None:
        control, name = request.app.state.control, asked.generation.model.name
        asked.prepared.warnings.extend(keep_for(control, call.caller, name, seconds))
    if asked.generation.stream:
        return EventStreamResponse(stream(call.gateway, asked, kind, data.model), LINES)
    work = complete(call.gateway, asked, kind, data.model)
    return Response(await while_connected(request.receive, work))


ollama_router = Router(
    path="/",
    route_handlers=[ollama_chat, ollama_generate, *embed_routes, *model_routes, *library_routes],
    tags=["Ollama"],
)
