"""Routes that return vectors and scores: embeddings, rankings, scores, classes."""

from typing import Annotated, Any

from litestar import Response, Router, post
from litestar.params import Body

from ..auth.guard import Access
from ..server.sse import while_connected
from .embeddings import embed, prepare_embeddings
from .pooling import (
    ClassifyRequest,
    ClassList,
    PoolingList,
    PoolingRequest,
    ScoreList,
    ScoreRequest,
    classify,
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


@post(
    "/v1/embeddings",
    status_code=200,
    opt={"access": Access.INFER},
    name="embeddings",
    operation_id="createEmbedding",
)
async def embeddings(
    request: HttpRequest, data: Annotated[EmbeddingRequest, Body()]
) -> Response[EmbeddingList]:
    """Return a vector for each text."""
    call = await RequestContext.of(request)
    with call.recording_refusals():
        generation = await prepare_embeddings(call, data)
    work = embed(call.gateway, generation, data, call.warnings(EmbeddingRequest))
    encoded: Any = await while_connected(request.receive, work)
    return Response(encoded, media_type="application/json")


@post(
    "/v1/rerank",
    status_code=200,
    opt={"access": Access.INFER},
    name="rerank",
    operation_id="createRerank",
)
async def rerank(request: HttpRequest, data: Annotated[RerankRequest, Body()]) -> Response[Ranking]:
    """Rank documents by their relevance to a query, the most relevant first."""
    return await _ranked(request, data, tells_documents=True)


@post("/rerank", status_code=200, opt={"access": Access.INFER}, name="rerank_plain", include_in_schema=False)
async def rerank_plain(request: HttpRequest, data: Annotated[RerankRequest, Body()]) -> Response[Ranking]:
    return await _ranked(request, data, tells_documents=True)


@post(
    "/v2/rerank",
    status_code=200,
    opt={"access": Access.INFER},
    name="rerank_v2",
    operation_id="createRerankV2",
)
async def rerank_v2(request: HttpRequest, data: Annotated[RerankRequest, Body()]) -> Response[Ranking]:
    """Rank documents for Cohere's clients. Documents come back only where `return_documents` asks
    for them.
    """
    return await _ranked(request, data, tells_documents=False)


async def _ranked(request: HttpRequest, data: RerankRequest, *, tells_documents: bool) -> Response[Ranking]:
    call = await RequestContext.of(request)
    if data.return_documents is None:
        data.return_documents = tells_documents
    with call.recording_refusals():
        judged = await prepare_rerank(call, data)
    work = rank(call.gateway, judged, data, call.warnings(RerankRequest) + judged.warnings)
    return Response(await while_connected(request.receive, work))


@post(
    "/v1/score",
    status_code=200,
    opt={"access": Access.INFER},
    name="score",
    operation_id="createScore",
)
async def score(request: HttpRequest, data: Annotated[ScoreRequest, Body()]) -> Response[ScoreList]:
    """Score how well pairs of texts go together."""
    return await _scored(request, data)


@post("/score", status_code=200, opt={"access": Access.INFER}, name="score_plain", include_in_schema=False)
async def score_plain(request: HttpRequest, data: Annotated[ScoreRequest, Body()]) -> Response[ScoreList]:
    return await _scored(request, data)


async def _scored(request: HttpRequest, data: ScoreRequest) -> Response[ScoreList]:
    call = await RequestContext.of(request)
    with call.recording_refusals():
        prepared = await prepare_score(call, data)
    return Response(await while_connected(request.receive, run_score(call, data, prepared)))


@post(
    "/classify",
    status_code=200,
    opt={"access": Access.INFER},
    name="classify",
    operation_id="createClassification",
)
async def classify_texts(
    request: HttpRequest, data: Annotated[ClassifyRequest, Body()]
) -> Response[ClassList]:
    """Return the probability of each class, from a classification model."""
    call = await RequestContext.of(request)
    with call.recording_refusals():
        model = await call.find_model(data.model, Deadlines.of(call).next)
        found = await require_classifier(model)
    return Response(await while_connected(request.receive, classify(call, data, model, found)))


@post(
    "/pooling",
    status_code=200,
    opt={"access": Access.INFER},
    name="pooling",
    operation_id="createPooling",
)
async def pooling(request: HttpRequest, data: Annotated[PoolingRequest, Body()]) -> Response[PoolingList]:
    """Return a vector, or class probabilities, for each text."""
    call = await RequestContext.of(request)
    encoded: Any = await while_connected(request.receive, run_pooling(call, data))
    return Response(encoded, media_type="application/json")


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
