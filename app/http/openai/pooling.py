"""vLLM's pooling routes: scores of pairs, classification, and `/pooling`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response
from litestar.params import Body
from msgspec import UNSET, Struct, UnsetType

from llmbox.engine.errors import ModelError
from llmbox.engine.sampling_params import Pooling

from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.choice_stream import as_base64, unit_vector
from ...gateway.generation import Generation
from ...text.reranker import (
    Classifier,
    Reranker,
    build_rerank_prompts,
    class_rows_of_gguf,
    classifier_of,
    not_a_classifier,
    read_classifier,
)
from ...util.threads import off_loop
from ..server.request import StrictRequest
from .completions import prompt_ids, prompt_items, with_prompt
from .embeddings import (
    PooledPrompts,
    PoolingFields,
    build_pooling_generation,
    check_dimensions,
    check_inputs,
    encode_pairs,
    find_reranker,
    has_encoder_head,
    pool,
)
from .request_context import RequestContext, answer, check_prompts, inference_route, truncate_prompts
from .request_types import EmbeddingRequest, TokenId, TruncateTo
from .response_types import EmbeddingUsage
from .sampling import invalid
from .unsupported import refuse_unsupported


class PooledAnswer(Struct, kw_only=True):
    """Fields of answers to `/score`, `/classify` and `/pooling`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: EmbeddingUsage
    warnings: list[str] | UnsetType = UNSET


class ScoreRequest(PoolingFields, kw_only=True):
    """Pairs of `text_1` and `text_2`: one with one, one with many, or pair by pair."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None


class Score(Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float
    """Relevance from 0 to 1 of a reranker or a chat model; cosine from -1 to 1 of an embedding model."""


class ScoreList(PooledAnswer, kw_only=True):
    data: list[Score]


class ClassifyRequest(PoolingFields, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]]
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncateTo | None = None


class TextClass(Struct, kw_only=True):
    index: int
    label: str
    """The most probable class."""
    probs: list[float]
    num_classes: int


class ClassList(PooledAnswer, kw_only=True):
    data: list[TextClass]


class PoolingRequest(EmbeddingRequest, kw_only=True):
    task: Literal["embed", "classify"] | None = None
    """Absent: `classify` for a model with classes, else `embed`."""


class PooledData(Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str
    """A vector of length 1 (base64 where asked for), or the probability of each class."""


class PoolingList(PooledAnswer, kw_only=True):
    data: list[PooledData]


@dataclass(frozen=True, slots=True)
class ScoreCall:
    generation: Generation
    judge: Reranker | None
    """Reranker. None: the score is the cosine of both texts' vectors, those of `text_1` first."""
    pairs: list[tuple[int, int]]
    """Places of both texts among the vectors."""


async def prepare_score(call: RequestContext, body: ScoreRequest) -> ScoreCall:
    """Check a score request and build its generation. Raises ApiError for every error that can be found
    before the engine has the request.
    """
    left, right = (_texts(body, name) for name in ("text_1", "text_2"))
    if len(left) not in {1, len(right)}:
        raise invalid("text_1", f"it must be one text, or as many texts as 'text_2' ({len(right)})")
    model = await call.find_model(body.model)
    reservation = call.reserve(model, len(left) + len(right), pools=True)
    judge = await _find_pair_reranker(model)
    if judge is None:
        prompts = await prompt_ids([*left, *right], "text_2", model, special=True)
        generation = build_pooling_generation(
            call, body, model, prompts, reservation, prefix="score", prompt_param="text_2"
        )
        firsts = range(len(left)) if len(left) > 1 else [0] * len(right)
        return ScoreCall(generation, None, list(zip(firsts, range(len(left), len(prompts)), strict=True)))
    pair_starts: list[int | None] | None = None
    if has_encoder_head(model):
        queries = left if len(left) > 1 else left * len(right)
        prompts, pair_starts = await encode_pairs(model, list(zip(queries, right, strict=True)))
    else:
        prompts = await _build_pair_prompts(call, model, left, right, body.instruction)
    check_prompts(prompts, "text_2", model)
    generation = build_pooling_generation(
        call, body, model, prompts, reservation, prefix="score", pooling="last", prompt_param="text_2"
    )
    return ScoreCall(replace(generation, pair_starts=pair_starts), judge, [])


async def run_score(call: RequestContext, body: ScoreRequest, prepared: ScoreCall) -> ScoreList:
    """Score all pairs. Raises ApiError."""
    found = await pool(call.gateway, prepared.generation)
    size = sum(map(len, found.vectors))
    scores = await off_loop(size, lambda: _scores(prepared, found.vectors))
    return ScoreList(
        **_common(call, body, prepared.generation, found),
        data=[Score(index=i, score=score) for i, score in enumerate(scores)],
    )


async def classify(
    call: RequestContext, body: ClassifyRequest, model: LoadedModel, found: Classifier
) -> ClassList:
    """Classify each input. Raises ApiError."""
    generation = await _inputs(call, body, model, "classify", "last")
    result = await pool(call.gateway, generation)
    size = sum(map(len, result.vectors)) * len(found.labels)
    probabilities = await off_loop(size, lambda: list(map(found.probabilities, result.vectors)))
    return ClassList(
        **_common(call, body, generation, result),
        data=[
            TextClass(
                index=i,
                label=found.labels[max(range(len(probs)), key=probs.__getitem__)],
                probs=probs,
                num_classes=len(probs),
            )
            for i, probs in enumerate(probabilities)
        ],
    )


def _common(
    call: RequestContext, body: PoolingFields | PoolingRequest, generation: Generation, result: PooledPrompts
) -> dict[str, Any]:
    """Return the fields of `PooledAnswer`."""
    tokens = result.usage.prompt_tokens
    return {
        "id": generation.id,
        "created": int(time.time()),
        "model": body.model or generation.model.name,
        "usage": EmbeddingUsage(tokens, tokens),
        "warnings": call.warnings(type(body)) or UNSET,
    }


async def find_classifier(model: LoadedModel) -> Classifier | None:
    """Return the model's classification head; None for a model without one. Raises ApiError 503 if its engine
    has the rows and does not answer.
    """
    path, loaded_at, info = model.path, model.loaded_at, model.supervisor.info
    labels = 0 if info is None else info.num_labels
    try:
        asked = None if labels else await off_loop(1 << 20, lambda: class_rows_of_gguf(path, loaded_at))
        if asked is not None:
            rows = await model.supervisor.weight_rows(asked)
            return await off_loop(1 << 20, lambda: classifier_of(path, rows))
        return await off_loop(1 << 20, lambda: read_classifier(path, loaded_at, labels))
    except ModelError:
        return None


async def require_classifier(model: LoadedModel) -> Classifier:
    """Return the model's classification head. Raises ApiError 400 for a model without one."""
    found = await find_classifier(model)
    if found is None:
        raise not_a_classifier()
    return found


async def prepare_pooling(call: RequestContext, body: PoolingRequest) -> tuple[Generation, Classifier | None]:
    """Check a request and build its generation. Raises ApiError."""
    refuse_unsupported(body)
    model = await call.find_model(body.model)
    classes = await find_classifier(model) if body.task != "embed" else None
    if body.task == "classify" and classes is None:
        raise not_a_classifier()
    if classes is not None and body.dimensions is not None:
        raise invalid("dimensions", "probabilities of classes have no dimensions to choose from")
    check_dimensions(body.dimensions, model)
    return await _inputs(call, body, model, "pool", None if classes is None else "last"), classes


async def run_pooling(
    call: RequestContext, body: PoolingRequest, prepared: tuple[Generation, Classifier | None]
) -> bytes:
    """Return the answer's JSON. Raises ApiError."""
    generation, classes = prepared
    result = await pool(call.gateway, generation)

    def encode() -> bytes:
        found = PoolingList(
            **_common(call, body, generation, result),
            data=[
                PooledData(index=i, data=_data(raw, body, classes)) for i, raw in enumerate(result.vectors)
            ],
        )
        return msgspec.json.encode(found)

    return await off_loop(sum(map(len, result.vectors)), encode)


def _data(raw: bytes, body: PoolingRequest, classes: Classifier | None) -> list[float] | str:
    if classes is not None:
        return classes.probabilities(raw)
    vector = unit_vector(raw, body.dimensions)
    return as_base64(vector) if body.encoding_format == "base64" else vector.tolist()


def _texts(body: ScoreRequest, name: str) -> list[str]:
    given = getattr(body, name)
    texts: list[str] = [given] if isinstance(given, str) else given
    if not texts:
        raise invalid(name, "it must not be empty")
    check_inputs(texts, name)
    return texts


async def _find_pair_reranker(model: LoadedModel) -> Reranker | None:
    """Return the model's reranker; None for an embedding model, whose cosine is the score. Raises ApiError
    400 for a model that is neither.
    """
    info = model.info
    try:
        return await find_reranker(model)
    except ApiError as error:
        if (
            error.status != 400
            or info.generates
            or info.pooling_problem
            or await find_classifier(model) is not None
        ):
            raise
        return None


async def _build_pair_prompts(
    call: RequestContext, model: LoadedModel, left: list[str], right: list[str], instruction: str | None
) -> list[list[int]]:
    """Build one prompt a pair. The template is rendered once for all pairs with the same `text_1`."""
    queries = left if len(left) > 1 else left * len(right)
    prompts: list[list[int]] = [[] for _ in right]
    for query in dict.fromkeys(queries):
        places = [i for i, each in enumerate(queries) if each == query]
        made = await build_rerank_prompts(
            call.gateway.templates, model.text, query, [right[i] for i in places], instruction
        )
        for i, prompt in zip(places, made, strict=True):
            prompts[i] = prompt
    return prompts


def _scores(prepared: ScoreCall, vectors: Sequence[bytes]) -> list[float]:
    if prepared.judge is not None:
        return list(map(prepared.judge.score, vectors))
    units = [unit_vector(raw, None) for raw in vectors]
    return [sum(map(float.__mul__, units[a], units[b])) for a, b in prepared.pairs]


async def _inputs(
    call: RequestContext,
    body: ClassifyRequest | PoolingRequest,
    model: LoadedModel,
    prefix: str,
    pooling: Pooling | None,
) -> Generation:
    """Build the generation of `input`. `pooling`: None for the one that the model's folder declares."""
    items = prompt_items(body.input, "input")
    check_inputs(items, "input")
    if isinstance(body, PoolingRequest) and pooling is None:
        items = await with_prompt(items, model, body.prompt_name, body.input_type)
    reservation = call.reserve(model, len(items), pools=True)
    prompts = await prompt_ids(items, "input", model, special=body.add_special_tokens is not False)
    prompts, _ = truncate_prompts(prompts, body.truncate_prompt_tokens, None, model)
    return build_pooling_generation(call, body, model, prompts, reservation, prefix=prefix, pooling=pooling)


@inference_route("/v1/score", "createScore")
async def score(request: StrictRequest, data: Annotated[ScoreRequest, Body()]) -> Response[ScoreList]:
    """Score the relevance or similarity of pairs of texts."""
    return await _scored(request, data)


@inference_route("/score")
async def score_plain(request: StrictRequest, data: Annotated[ScoreRequest, Body()]) -> Response[ScoreList]:
    return await _scored(request, data)


async def _scored(request: StrictRequest, data: ScoreRequest) -> Response[ScoreList]:
    return await answer(
        request, lambda call: prepare_score(call, data), lambda call, made: run_score(call, data, made)
    )


@inference_route("/classify", "createClassification")
async def classify_texts(
    request: StrictRequest, data: Annotated[ClassifyRequest, Body()]
) -> Response[ClassList]:
    """Return the probability of each class, from a classification model."""

    async def prepare(call: RequestContext) -> tuple[LoadedModel, Classifier]:
        model = await call.find_model(data.model)
        return model, await require_classifier(model)

    return await answer(request, prepare, lambda call, made: classify(call, data, *made))


@inference_route("/pooling", "createPooling")
async def pooling(request: StrictRequest, data: Annotated[PoolingRequest, Body()]) -> Response[PoolingList]:
    """Return a vector, or class probabilities, for each text."""
    return await answer(
        request, lambda call: prepare_pooling(call, data), lambda call, made: run_pooling(call, data, made)
    )
