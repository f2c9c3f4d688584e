"""Routes that return vectors and scores: embeddings, rankings, scores, classes."""

from typing import Annotated

from litestar import Response, Router
from litestar.params import Body

from ...engines.loaded_model import LoadedModel
from ...text.classifier import Classifier
from .embeddings import embed, prepare_embeddings
from .generating import answer, inference_route
from .pooling import (
    ClassifyRequest,
    ClassList,
    PoolingList,
    PoolingRequest,
    ScoreList,
    ScoreRequest,
    classify,
    prepare_pooling,
    prepare_score,
    require_classifier,
    run_pooling,
    run_score,
)
from .prepared_request import Deadlines
from .request_context import HttpRequest, RequestContext
from .request_types import EmbeddingRequest, RerankRequest
from .rerank import prepare_rerank, rank
from .response_types import EmbeddingList, Ranking


@inference_route("/v1/embeddings", "embeddings", "createEmbedding")
async def embeddings(
    request: HttpRequest, data: Annotated[EmbeddingRequest, Body()]
) -> Response[EmbeddingList]:
    """Return a vector for each text."""
    return await answer(
        request,
        lambda call: prepare_embeddings(call, data),
        lambda call, made: embed(call.gateway, made, data, call.warnings(EmbeddingRequest)),
    )


@inference_route("/v1/rerank", "rerank", "createRerank")
async def rerank(request: HttpRequest, data: Annotated[RerankRequest, Body()]) -> Response[Ranking]:
    """Rank documents by their relevance to a query, the most relevant first."""
    return await _ranked(request, data, tells_documents=True)


@inference_route("/rerank", "rerank_plain")
async def rerank_plain(request: HttpRequest, data: Annotated[RerankRequest, Body()]) -> Response[Ranking]:
    return await _ranked(request, data, tells_documents=True)


@inference_route("/v2/rerank", "rerank_v2", "createRerankV2")
async def rerank_v2(request: HttpRequest, data: Annotated[RerankRequest, Body()]) -> Response[Ranking]:
    """Rank documents for Cohere's clients. Documents come back only where `return_documents` asks
    for them.
    """
    return await _ranked(request, data, tells_documents=False)


async def _ranked(request: HttpRequest, data: RerankRequest, *, tells_documents: bool) -> Response[Ranking]:
    if data.return_documents is None:
        data.return_documents = tells_documents
    return await answer(
        request,
        lambda call: prepare_rerank(call, data),
        lambda call, made: rank(call.gateway, made, data, call.warnings(RerankRequest) + made.warnings),
    )


@inference_route("/v1/score", "score", "createScore")
async def score(request: HttpRequest, data: Annotated[ScoreRequest, Body()]) -> Response[ScoreList]:
    """Score how well pairs of texts go together."""
    return await _scored(request, data)


@inference_route("/score", "score_plain")
async def score_plain(request: HttpRequest, data: Annotated[ScoreRequest, Body()]) -> Response[ScoreList]:
    return await _scored(request, data)


async def _scored(request: HttpRequest, data: ScoreRequest) -> Response[ScoreList]:
    return await answer(
        request, lambda call: prepare_score(call, data), lambda call, made: run_score(call, data, made)
    )


@inference_route("/classify", "classify", "createClassification")
async def classify_texts(
    request: HttpRequest, data: Annotated[ClassifyRequest, Body()]
) -> Response[ClassList]:
    """Return the probability of each class, from a classification model."""

    async def prepare(call: RequestContext) -> tuple[LoadedModel, Classifier]:
        model = await call.find_model(data.model, Deadlines.of(call).next)
        return model, await require_classifier(model)

    return await answer(request, prepare, lambda call, made: classify(call, data, *made))


@inference_route("/pooling", "pooling", "createPooling")
async def pooling(request: HttpRequest, data: Annotated[PoolingRequest, Body()]) -> Response[PoolingList]:
    """Return a vector, or class probabilities, for each text."""
    return await answer(
        request, lambda call: prepare_pooling(call, data), lambda call, made: run_pooling(call, data, made)
    )


pooling_router = Router(
    path="/",
    route_handlers=[
        embeddings,
        rerank,
        rerank_plain,
        rerank_v2,
        score,
        score_plain,
        classify_texts,
        pooling,
    ],
    tags=["OpenAI"],
)
