"""POST /v1/rerank: the relevance of each document to a query."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from litestar import Response
from litestar.params import Body
from msgspec import UNSET

from llmbox.engine.errors import ModelError

from ...engines.loaded_model import LoadedModel
from ...gateway.gateway import Gateway
from ...gateway.generation import Generation
from ...text.reranker import Reranker, answer_ids, build_rerank_prompts, not_a_reranker, read_reranker
from ...util.threads import off_loop
from .completions import check_prompts
from .embeddings import check_inputs, pool, pooled
from .request_context import HttpRequest, RequestContext, answer, inference_route
from .request_types import RerankRequest
from .response_types import EmbeddingUsage, Ranked, RankedDocument, Ranking
from .sampling import invalid, public_id
from .unsupported import refuse_unsupported


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
    id_ = public_id("rerank", body.request_id, call.exchange, call.gateway)
    salt = body.cache_salt or ""
    generation = pooled(call, model, prompts, "last", id_, reservation, body.priority, salt, "documents")
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
    told = f"{count} documents were cut to {most} tokens, as 'max_tokens_per_doc' asks."
    return cut, [told] if count else []


async def find_reranker(model: LoadedModel) -> Reranker:
    """Return the model's reranker. Raises ApiError 400 for a model that cannot rank."""
    info = model.supervisor.info
    assert info is not None
    if info.num_labels > 1:
        raise not_a_reranker(f"it sorts texts into {info.num_labels} classes and gives no score")
    if info.num_labels == 1:
        return Reranker([])
    asks = info.generates or info.pooling_problem
    answers = await model.text.off_loop(0, lambda: answer_ids(model.text)) if asks else None
    try:
        return await off_loop(info.vocab_size, lambda: read_reranker(model.path, model.loaded_at, answers))
    except ModelError:
        raise not_a_reranker("the rows of its head cannot be read from its files") from None


async def rank(gateway: Gateway, judged: CheckedRerank, body: RerankRequest, warnings: list[str]) -> Ranking:
    """Score the documents and sort them. Raises ApiError."""
    found = await pool(gateway, judged.generation)
    size = sum(map(len, found.vectors))
    scores = await off_loop(size, lambda: list(map(judged.judge.score, found.vectors)))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
    tells = body.return_documents is not False
    results = [
        Ranked(
            index=i,
            relevance_score=scores[i],
            document=RankedDocument(judged.documents[i]) if tells else UNSET,
        )
        for i in order
    ]
    tokens = found.usage.prompt_tokens
    return Ranking(
        id=judged.generation.id,
        model=body.model or judged.generation.model.name,
        results=results,
        usage=EmbeddingUsage(tokens, tokens),
        warnings=warnings or UNSET,
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
