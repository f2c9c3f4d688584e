"""POST /v1/embeddings and /v1/rerank: vectors of length 1, and the relevance of documents to a query."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

import msgspec
from litestar import Response
from litestar.params import Body
from msgspec import UNSET, Struct

from llmbox.engine.errors import ModelError
from llmbox.engine.ipc.messages import ModelInfo
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.sampling_params import Pooling, SamplingParams

from ...engines.admission import QueueReservation
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.choice_stream import as_base64, unit_vector
from ...gateway.gateway import Gateway
from ...gateway.generation import Generation, TokenUsage
from ...text.reranker import (
    Reranker,
    answer_ids,
    build_rerank_prompts,
    not_a_reranker,
    read_reranker,
    reranker_of,
    rows_of_gguf,
)
from ...util.threads import off_loop
from ..server.request import StrictRequest
from .completions import prompt_ids, prompt_items, with_prompt
from .request_context import RequestContext, answer, check_prompts, inference_route, truncate_prompts
from .request_types import EmbeddingRequest, Name, Priority, RequestId, RerankRequest, Salt, Tag
from .response_types import (
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    RankedDocument,
    RerankResponse,
    RerankResult,
)
from .sampling import invalid, public_id
from .unsupported import refuse_unsupported

MAX_INPUTS: Final = 2048
"""OpenAI's limit."""


class PoolingFields(Struct, kw_only=True):
    """Fields of requests for scores and classes."""

    model: Name | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None
    user: Tag | None = None


@dataclass(frozen=True, slots=True)
class PooledPrompts:
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
    model = await call.find_model(body.model)
    check_dimensions(body.dimensions, model)
    task, instruction = await find_task(model, body.task)
    if body.prompt_name is None and task is not None:
        items = [instruction + item if isinstance(item, str) else item for item in items]
    else:
        items = await with_prompt(items, model, body.prompt_name, body.input_type)
    special = body.add_special_tokens is not False
    reservation = call.reserve(model, len(items), pools=True)
    prompts = await prompt_ids(items, "input", model, special=special)
    prompts, _ = truncate_prompts(prompts, body.truncate_prompt_tokens, None, model)
    generation = build_pooling_generation(call, body, model, prompts, reservation, prefix="embd")
    return replace(generation, params=replace(generation.params, task=task))


async def find_task(model: LoadedModel, name: str | None) -> tuple[int | None, str]:
    """Return the index of a task that has an adapter, and its instruction; None for a model without tasks.
    Raises ApiError 400 for a name that is none of them.
    """
    if name is None:
        return None, ""
    tasks = await off_loop(1 << 20, lambda: _read_tasks(model.path, model.loaded_at))
    names = [each for each, _ in tasks]
    if tasks and name not in names:
        raise invalid("task", f"{name!r} is not a task of this model; it has {', '.join(names)}")
    return (names.index(name), tasks[names.index(name)][1]) if tasks else (None, "")


@lru_cache(maxsize=16)
def _read_tasks(folder: Path, loaded_at: float) -> tuple[tuple[str, str], ...]:  # noqa: ARG001
    """Read the tasks of a model and their instructions, once each time it is loaded. Raises ModelError."""
    encoder = parse_config(folder).encoder
    return () if encoder is None else encoder.tasks


def _ignored_task(generation: Generation, body: EmbeddingRequest) -> list[str]:
    if body.task is None or generation.params.task is not None:
        return []
    return ["'task' has no effect on this model: it has no adapters of tasks."]


def check_inputs(items: Sequence[str | list[int]], param: str) -> None:
    """Check the inputs without a model. Raises ApiError 400."""
    if len(items) > MAX_INPUTS:
        raise invalid(
            param, f"at most {MAX_INPUTS} inputs can be sent at once, and the request has {len(items)}"
        )
    for i, item in enumerate(items):
        if not item:
            raise invalid(param if len(items) == 1 else f"{param}[{i}]", "it must not be empty")


def check_dimensions(dimensions: int | None, model: LoadedModel) -> None:
    """Check `dimensions` against the model. Raises ApiError 400."""
    size = model.info.hidden_size
    if dimensions is not None and dimensions > size:
        raise invalid("dimensions", f"this model's vectors have {size}, not {dimensions}")


def build_pooling_generation(
    call: RequestContext,
    body: EmbeddingRequest | RerankRequest | PoolingFields,
    model: LoadedModel,
    prompts: list[list[int]],
    reservation: QueueReservation,
    *,
    prefix: str,
    pooling: Pooling | None = None,
    prompt_param: str = "input",
) -> Generation:
    """Build a generation that pools. `pooling`: that of a decoder, or None for the one that its folder
    declares; an encoder always runs its head, or the pooling that its folder declares. `prefix`: of the
    answer's id.

    Raises ApiError 400 for a model that makes no vectors, where `pooling` is None.
    """
    info = model.info
    if pooling is None:
        _require_embeddings(model.name, info)
    if pooling is None or info.pooling in {"embed", "classify"}:
        pooling = info.pooling
    return Generation(
        id=public_id(prefix, body.request_id, call.exchange, call.gateway),
        model=model,
        prompts=prompts,
        params=SamplingParams(max_tokens=0, pooling=pooling),
        **call.caller_fields(body.priority, body.cache_salt),
        reservation=reservation,
        prompt_param=prompt_param,
    )


def _require_embeddings(name: str, info: ModelInfo) -> None:
    problem = info.pooling_problem
    if info.num_labels:
        problem = "it scores texts, at /v1/rerank if it has one label and at /classify"
    if problem:
        raise ApiError(
            400, f"{name} cannot make embeddings: {problem}.", code="embeddings_not_supported", param="model"
        )


async def pool(gateway: Gateway, generation: Generation) -> PooledPrompts:
    """Run the generation and collect its pooled output. Raises ApiError."""
    vectors = [b""] * len(generation.prompts)
    with gateway.open(generation) as opened:
        async for delta in opened.deltas():
            assert delta.vector is not None
            vectors[delta.index] = delta.vector
    return PooledPrompts(vectors, opened.usage)


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


def _answer(pooled: PooledPrompts, body: EmbeddingRequest, name: str, warnings: list[str]) -> EmbeddingList:
    data = []
    for index, raw in enumerate(pooled.vectors):
        vector = unit_vector(raw, body.dimensions)
        result = as_base64(vector) if body.encoding_format == "base64" else vector.tolist()
        data.append(Embedding(index=index, embedding=result))
    tokens = pooled.usage.prompt_tokens
    return EmbeddingList(
        data=data, model=name, usage=EmbeddingUsage(tokens, tokens), warnings=warnings or UNSET
    )


@inference_route("/v1/embeddings", "createEmbedding")
async def embeddings(
    request: StrictRequest, data: Annotated[EmbeddingRequest, Body()]
) -> Response[EmbeddingList]:
    """Return a vector for each text."""
    return await answer(
        request,
        lambda call: prepare_embeddings(call, data),
        lambda call, made: embed(
            call.gateway, made, data, call.warnings(EmbeddingRequest) + _ignored_task(made, data)
        ),
    )


@dataclass(frozen=True, slots=True)
class CheckedRerank:
    generation: Generation
    judge: Reranker
    documents: list[str]
    warnings: list[str]


async def prepare_rerank(call: RequestContext, body: RerankRequest) -> CheckedRerank:
    """Check a rerank request and build its generation. Raises ApiError for every error that can be found
    before the engine has the request.
    """
    refuse_unsupported(body)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    if not documents:
        raise invalid("documents", "it must not be empty")
    check_inputs(documents, "documents")
    if not body.query:
        raise invalid("query", "it must not be empty")
    model = await call.find_model(body.model)
    reservation = call.reserve(model, len(documents), pools=True)
    judge = await find_reranker(model)
    templates = call.gateway.templates
    documents, cut = await _cut(documents, body.max_tokens_per_doc, model)
    pair_starts: list[int | None] | None = None
    if has_encoder_head(model):
        pairs = [(body.query, document) for document in documents]
        prompts, pair_starts = await encode_pairs(model, pairs)
        cut += ["'instruction' has no effect on this model."] if body.instruction else []
    else:
        prompts = await build_rerank_prompts(templates, model.text, body.query, documents, body.instruction)
    check_prompts(prompts, "documents", model)
    generation = build_pooling_generation(
        call,
        body,
        model,
        prompts,
        reservation,
        prefix="rerank",
        pooling="last",
        prompt_param="documents",
    )
    return CheckedRerank(replace(generation, pair_starts=pair_starts), judge, documents, cut)


def has_encoder_head(model: LoadedModel) -> bool:
    """Return True if the engine runs the head of this reranker or classifier, an encoder."""
    info = model.supervisor.info
    return info is not None and info.num_labels > 0


async def encode_pairs(
    model: LoadedModel, pairs: Sequence[tuple[str, str]]
) -> tuple[list[list[int]], list[int | None]]:
    """Encode pairs of a query and a document, as `TextModel.encode_pairs` does. Raises ApiError 400."""
    size = sum(len(query) + len(document) for query, document in pairs)
    return await model.text.off_loop(size, lambda: model.text.encode_pairs(pairs))


async def _cut(documents: list[str], most: int | None, model: LoadedModel) -> tuple[list[str], list[str]]:
    """Cut each document to its first `most` tokens. Returns the texts, and a warning if something was cut."""
    if most is None:
        return documents, []
    size = sum(map(len, documents))
    cut = await model.text.off_loop(
        size, lambda: [model.text.beginning(document, most) for document in documents]
    )
    count = sum(len(a) > len(b) for a, b in zip(documents, cut, strict=True))
    text = f"{count} documents were cut to {most} tokens, as 'max_tokens_per_doc' asks."
    return cut, [text] if count else []


async def find_reranker(model: LoadedModel) -> Reranker:
    """Return the model's reranker. Raises ApiError 400 for a model that cannot rank."""
    info = model.info
    if info.num_labels > 1:
        raise not_a_reranker(f"it sorts texts into {info.num_labels} classes and gives no score")
    if info.num_labels == 1:
        return Reranker([])
    asks = info.generates or info.pooling_problem
    answers = await model.text.off_loop(0, lambda: answer_ids(model.text)) if asks else None
    try:
        asked = await off_loop(info.vocab_size, lambda: rows_of_gguf(model.path, model.loaded_at, answers))
        if asked is not None:
            found = await model.supervisor.weight_rows(asked)
            return await off_loop(info.vocab_size, lambda: reranker_of(model.path, found))
        return await off_loop(info.vocab_size, lambda: read_reranker(model.path, model.loaded_at, answers))
    except ModelError:
        raise not_a_reranker("the rows of its head cannot be read from its files") from None


async def rank(
    gateway: Gateway, judged: CheckedRerank, body: RerankRequest, warnings: list[str]
) -> RerankResponse:
    """Score the documents and sort them. Raises ApiError."""
    found = await pool(gateway, judged.generation)
    size = sum(map(len, found.vectors))
    scores = await off_loop(size, lambda: list(map(judged.judge.score, found.vectors)))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
    has_documents = body.return_documents is not False
    results = [
        RerankResult(
            index=i,
            relevance_score=scores[i],
            document=RankedDocument(judged.documents[i]) if has_documents else UNSET,
        )
        for i in order
    ]
    tokens = found.usage.prompt_tokens
    return RerankResponse(
        id=judged.generation.id,
        model=body.model or judged.generation.model.name,
        results=results,
        usage=EmbeddingUsage(tokens, tokens),
        warnings=warnings or UNSET,
    )


@inference_route("/v1/rerank", "createRerank")
async def rerank(request: StrictRequest, data: Annotated[RerankRequest, Body()]) -> Response[RerankResponse]:
    """Rank documents by their relevance to a query, the most relevant first."""
    return await _ranked(request, data, returns_documents=True)


@inference_route("/rerank")
async def rerank_plain(
    request: StrictRequest, data: Annotated[RerankRequest, Body()]
) -> Response[RerankResponse]:
    return await _ranked(request, data, returns_documents=True)


@inference_route("/v2/rerank", "createRerankV2")
async def rerank_v2(
    request: StrictRequest, data: Annotated[RerankRequest, Body()]
) -> Response[RerankResponse]:
    """Rank documents for Cohere's clients. Documents come back only where `return_documents` asks
    for them.
    """
    return await _ranked(request, data, returns_documents=False)


async def _ranked(
    request: StrictRequest, data: RerankRequest, *, returns_documents: bool
) -> Response[RerankResponse]:
    if data.return_documents is None:
        data.return_documents = returns_documents
    return await answer(
        request,
        lambda call: prepare_rerank(call, data),
        lambda call, made: rank(call.gateway, made, data, call.warnings(RerankRequest) + made.warnings),
    )
