"""Routes of the OpenAI dialect. `/v1/models` answers Anthropic's clients in their shape, with pages."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from litestar import Response, Router, delete, get
from litestar.params import Body, Parameter, QueryParameter
from msgspec import Struct

from ...control.controller import DaemonController
from ...engines.admission import model_not_found
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.gateway import context_limit
from ...text.tokenizer.text_loader import read_tokenizer_config
from ...util.formatting import hide_folders, rfc3339
from ...util.threads import off_loop
from ..auth.guard import Access, identity_of
from ..server.errors import is_anthropic_client
from ..server.request import StrictRequest
from .batches import openai_batches_router
from .chat import ChatCall, chat_ids, complete_chat, prepare_chat
from .chat_messages import build_chat
from .chat_stream import stream_chat
from .completions import complete, prepare_completion, stream_completion
from .embeddings import embeddings, rerank, rerank_plain, rerank_v2
from .files import files_router
from .pooling import classify_texts, pooling, score, score_plain
from .request_context import RequestContext, answer, inference_route
from .request_types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .response_types import (
    ChatCompletion,
    Completion,
    DeletedModel,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
)
from .sampling import invalid
from .stored import Store, stored_chats_router
from .unsupported import refuse_unsupported


class AnthropicModel(Struct, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    """Both are the context: prompt and answer share it."""
    lifecycle: Literal["active"] = "active"
    deprecated_at: None = None
    retires_at: None = None
    line: None = None
    capabilities: None = None


class AnthropicModelPage(Struct, kw_only=True):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(model: ModelCard) -> AnthropicModel:
    return AnthropicModel(
        id=model.id,
        display_name=model.id.rpartition("/")[2],
        created_at=rfc3339(model.created),
        max_input_tokens=model.context_window,
        max_tokens=model.context_window,
    )


def model_page(
    models: Sequence[ModelCard], limit: int, after_id: str | None, before_id: str | None
) -> AnthropicModelPage:
    """Return one page of `models`. Raises ApiError where a cursor names no listed model."""
    if after_id and before_id:
        raise ApiError(
            400, "'before_id' cannot be combined with 'after_id'.", code="invalid_value", param="before_id"
        )
    ids = [model.id for model in models]
    if cursor := after_id or before_id:
        if cursor not in ids:
            raise ApiError(
                404,
                f"The model {cursor!r} does not exist here.",
                code="model_not_found",
                param="after_id" if after_id else "before_id",
            )
        place = ids.index(cursor)
        models = models[place + 1 :] if after_id else models[:place]
    shown = [model_info(model) for model in (models[-limit:] if before_id else models[:limit])]
    return AnthropicModelPage(
        data=shown,
        has_more=len(models) > limit,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )


@inference_route("/v1/chat/completions", "createChatCompletion")
async def chat_completions(
    request: StrictRequest, data: Annotated[ChatCompletionRequest, Body()]
) -> Response[ChatCompletion]:
    """Generate the model's next message in a conversation; server-sent events with `stream`."""

    async def prepare(call: RequestContext) -> tuple[ChatCall, Store | None]:
        store = Store.of(call, "chat", data.metadata, call.plain["messages"]) if data.store else None
        return await prepare_chat(call, data), store

    return await answer(
        request,
        prepare,
        lambda call, made: complete_chat(call.gateway, *made),
        (lambda call, made: stream_chat(call.gateway, *made)) if data.stream else None,
    )


@inference_route("/v1/completions", "createCompletion")
async def completions(
    request: StrictRequest, data: Annotated[CompletionRequest, Body()]
) -> Response[Completion]:
    """Continue a raw prompt; server-sent events with `stream`."""
    return await answer(
        request,
        lambda call: prepare_completion(call, data),
        lambda call, made: complete(call.gateway, made),
        (lambda call, made: stream_completion(call.gateway, made)) if data.stream else None,
    )


@get("/v1/models", opt={"access": Access.KNOWN}, operation_id="listModels")
async def models(
    request: StrictRequest,
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 20,
    after_id: Annotated[str | None, QueryParameter(max_length=512)] = None,
    before_id: Annotated[str | None, QueryParameter(max_length=512)] = None,
) -> ModelList | AnthropicModelPage:
    """List every model that may be requested, aliases included: loaded, or loaded by the request that names
    it.

    Pages, and Anthropic's shape, are for requests with the header `anthropic-version` or `x-api-key`.
    """
    listed = await listed_models(await RequestContext.of(request))
    if is_anthropic_client(request):
        return model_page(listed, limit, after_id, before_id)
    return ModelList(data=listed)


@get("/v1/models/{model_id:path}", opt={"access": Access.KNOWN}, operation_id="retrieveModel")
async def model(request: StrictRequest, model_id: Annotated[str, Parameter()]) -> ModelCard | AnthropicModel:
    """Return one model; ids may contain slashes."""
    wanted = model_id.removeprefix("/")
    for found in await listed_models(await RequestContext.of(request)):
        if found.id == wanted:
            return model_info(found) if is_anthropic_client(request) else found
    raise model_not_found(wanted)


@delete(
    "/v1/models/{model_id:path}", status_code=200, opt={"access": Access.ADMIN}, operation_id="deleteModel"
)
async def remove_model(request: StrictRequest, model_id: Annotated[str, Parameter()]) -> DeletedModel:
    """Delete a model from this disk, as `llmbox rm` does; one that was adopted is only forgotten."""
    control: DaemonController = request.app.state.control
    name = model_id.removeprefix("/")
    identity_of(request).require_model(name)
    await control.library.remove([name])
    return DeletedModel(id=name)


@inference_route("/tokenize", "tokenize")
async def tokenize(request: StrictRequest, data: Annotated[TokenizeRequest, Body()]) -> Tokenized:
    """Return the token ids of a text, or of a conversation as the model would see it."""
    call = await RequestContext.of(request)
    refuse_unsupported(data)
    if (data.prompt is None) == (data.messages is None):
        raise invalid("prompt", "exactly one of 'prompt' and 'messages' is needed")
    chat = build_chat(data, call.limits) if data.messages is not None else None
    model = await call.find_model(data.model)
    if chat is not None:
        ids = await chat_ids(call.gateway, model, chat)
    else:
        text, special = data.prompt or "", data.add_special_tokens is not False
        ids = await model.text.off_loop(
            len(text), lambda: model.text.encode(text, add_special_tokens=special)
        )
    strings = None
    if data.return_token_strs:
        strings = await off_loop(len(ids), lambda: [model.text.token_text(i) for i in ids])
    limit = context_limit(model.info)
    return Tokenized(tokens=ids, count=len(ids), max_model_len=limit, token_strs=strings)


@inference_route("/detokenize", "detokenize")
async def detokenize(request: StrictRequest, data: Annotated[DetokenizeRequest, Body()]) -> Detokenized:
    """Return the text of token ids, special tokens by name."""
    call = await RequestContext.of(request)
    model = await call.find_model(data.model)
    size = model.info.vocab_size
    if data.tokens and max(data.tokens) >= size:
        raise invalid("tokens", f"token id {max(data.tokens)} is not in the vocabulary of {size}")
    text = await off_loop(len(data.tokens), lambda: model.text.decode(data.tokens, skip_special=False))
    return Detokenized(prompt=text)


@get("/tokenizer_info", opt={"access": Access.INFER}, operation_id="tokenizerInfo")
async def tokenizer_info(
    request: StrictRequest, model: Annotated[str | None, QueryParameter(max_length=512)] = None
) -> dict[str, Any]:
    """Return a model's `tokenizer_config.json`, with the chat template that is used."""
    call = await RequestContext.of(request)
    found = await call.find_model(model)
    config = await asyncio.to_thread(read_tokenizer_config, found.path)
    return {"tokenizer_class": "PreTrainedTokenizerFast", **config, "chat_template": found.text.chat_template}


async def listed_models(call: RequestContext) -> list[ModelCard]:
    shown = _loaded(call)
    for offer in [] if call.services.offers is None else await call.services.offers():
        target = call.services.engines.find(call.services.real_name(offer.name))
        if target is not None:
            _show(shown, call, offer.name, target, None)
        elif offer.name not in shown and call.caller.may_use_model(offer.name):
            shown[offer.name] = ModelCard(
                id=offer.name,
                created=offer.created,
                context_window=offer.context_window,
                max_model_len=offer.context_window,
                state=offer.state,
            )
    for name, alias in call.services.aliases().items():
        if alias.adapter and name in shown:
            shown[name].parent = hide_folders(call.services.real_name(name))
    return list(shown.values())


def _loaded(call: RequestContext) -> dict[str, ModelCard]:
    shown: dict[str, ModelCard] = {}
    for model in call.services.engines.models():
        for name in (model.name, *sorted(model.aliases)):
            _show(shown, call, name, model, None)
    for name, alias in sorted(call.services.aliases().items()):
        target = call.services.engines.find(call.services.real_name(name))
        if target is not None:
            _show(shown, call, name, target, alias.context)
    return shown


def _show(
    shown: dict[str, ModelCard], call: RequestContext, name: str, model: LoadedModel, cap: int | None
) -> None:
    """Add a model to the list `shown`. `cap`: an alias's context."""
    info = model.supervisor.info
    if info is not None and name not in shown and call.caller.may_use_model(name):
        limit = min(context_limit(info), cap or context_limit(info))
        shown[name] = ModelCard(
            id=name, created=int(model.loaded_at), context_window=limit, max_model_len=limit
        )


openai_router = Router(
    path="/",
    route_handlers=[
        chat_completions,
        completions,
        models,
        model,
        remove_model,
        tokenize,
        detokenize,
        tokenizer_info,
        embeddings,
        rerank,
        rerank_plain,
        rerank_v2,
        score,
        score_plain,
        classify_texts,
        pooling,
        files_router,
        openai_batches_router,
        stored_chats_router,
    ],
    tags=["OpenAI"],
)
