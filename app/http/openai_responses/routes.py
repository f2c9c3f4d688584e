"""Routes of the Responses and Conversations APIs: generate responses; create, read, update and delete
conversations and their items.
"""

import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from litestar import Request, Response, Router, delete, get, post
from litestar.params import Body, FromPath
from msgspec import UNSET, Struct, UnsetType

from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...store.stored_answers import StoredAnswer
from ..auth.guard import Access, services_and_owner
from ..openai.chat_messages import reasoning_tokens
from ..openai.request_context import RequestContext, answer, inference_route
from ..openai.sampling import invalid
from ..openai.stored import (
    After,
    DeletedObject,
    Limit,
    Order,
    Store,
    StoredPage,
    check_metadata,
    page_after,
    page_of,
)
from ..openai.unsupported import refuse_unsupported
from ..server.request import StrictRequest
from ..server.sse import EventStreamResponse, while_connected
from .items import InputTokens, ResponseObject, ResponseUsage, chat_messages, summary_item
from .request_types import CompactRequest, InputTokensRequest, ResponseRequest
from .stored import (
    STREAM,
    check_background,
    complete_response,
    queue_full,
    start_background,
    stored_responses_router,
    stream_response,
)
from .tools import joined_name, with_places
from .translate import (
    PreparedResponse,
    check_room,
    count_input_tokens,
    find_conversation,
    items_of,
    prepare_response,
    require_storing,
    with_ids,
)

_PATH = "/v1/conversations/{conversation_id:str}"
_ITEMS, _ITEM = _PATH + "/items", _PATH + "/items/{item_id:str}"
_MOST_AT_ONCE = 20
_PARAM = "conversation_id"


class Conversation(Struct, kw_only=True):
    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationCreate(Struct, kw_only=True):
    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(Struct, kw_only=True):
    metadata: dict[str, str] | None
    """Replaces the stored metadata."""


class ItemsCreate(Struct, kw_only=True):
    items: list[dict[str, Any]]


@post("/v1/conversations", status_code=200, operation_id="createConversation")
async def create_conversation(
    request: StrictRequest, data: Annotated[ConversationCreate, Body()]
) -> Conversation:
    """Create a conversation with up to 20 items. It is stored, for its owner alone, until it is deleted or
    expires.
    """
    services, owner = services_and_owner(request)
    require_storing(services, None)
    metadata, items = data.metadata or {}, data.items or []
    check_metadata(metadata)
    _check(items)
    now = time.time()
    made = Conversation(id=f"conv_{secrets.token_hex(16)}", created_at=int(now), metadata=metadata)
    kept = StoredAnswer(
        kind="conversation",
        owner=owner,
        id=made.id,
        created=now,
        model="",
        metadata=metadata,
        input=with_ids(items),
        answer={"created_at": made.created_at},
    )
    _require_room(services.stored.put(kept, await _size(request)))
    return made


@get(_PATH, operation_id="getConversation")
async def get_conversation(request: StrictRequest, conversation_id: FromPath[str]) -> Conversation:
    """Return one of the caller's conversations."""
    return _to_conversation(await _find(request, conversation_id))


@post(_PATH, status_code=200, operation_id="updateConversation")
async def update_conversation(
    request: StrictRequest, conversation_id: FromPath[str], data: Annotated[ConversationUpdate, Body()]
) -> Conversation:
    """Change the metadata of a conversation."""
    services, owner = services_and_owner(request)
    metadata = data.metadata or {}
    check_metadata(metadata)
    await services.stored.update("conversation", owner, conversation_id, metadata)
    return _to_conversation(await _find(request, conversation_id))


@delete(_PATH, status_code=200, operation_id="deleteConversation")
async def delete_conversation(request: StrictRequest, conversation_id: FromPath[str]) -> DeletedObject:
    """Erase a conversation with its items; the bytes are overwritten. Responses of it that were stored by
    themselves stay.
    """
    services, owner = services_and_owner(request)
    await _find(request, conversation_id)
    await services.stored.delete("conversation", owner, conversation_id)
    return DeletedObject(id=conversation_id, object="conversation.deleted")


@post(_ITEMS, status_code=200, operation_id="createConversationItems")
async def create_items(
    request: StrictRequest, conversation_id: FromPath[str], data: Annotated[ItemsCreate, Body()]
) -> StoredPage:
    """Add up to 20 items at the end of a conversation."""
    services, owner = services_and_owner(request)
    require_storing(services, None)
    _check(data.items)
    found = await _find(request, conversation_id)
    check_room(len(found.input) + len(data.items), services.settings.limits.messages, "items")
    added = with_ids(data.items)
    size = await _size(request)
    _require_room(services.stored.append("conversation", owner, conversation_id, added, size))
    return page_of(added, len(added))


@get(_ITEMS, operation_id="listConversationItems")
async def list_items(
    request: StrictRequest,
    conversation_id: FromPath[str],
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> StoredPage:
    """List a conversation's items, the newest first unless `order` is `asc`."""
    found = await _find(request, conversation_id)
    return page_after(list(found.input), after, limit, order)


@get(_ITEM, operation_id="getConversationItem")
async def get_item(
    request: StrictRequest, conversation_id: FromPath[str], item_id: FromPath[str]
) -> dict[str, Any]:
    """Return one item of a conversation."""
    found = await _find(request, conversation_id)
    for item in found.input:
        if item["id"] == item_id:
            data: dict[str, Any] = item
            return data
    raise _no_item(item_id)


@delete(_ITEM, status_code=200, operation_id="deleteConversationItem")
async def delete_item(
    request: StrictRequest, conversation_id: FromPath[str], item_id: FromPath[str]
) -> Conversation:
    """Erase one item of a conversation; its bytes are overwritten."""
    services, owner = services_and_owner(request)
    found = await _find(request, conversation_id)
    if not await services.stored.remove_item("conversation", owner, conversation_id, item_id):
        raise _no_item(item_id)
    return _to_conversation(found)


def _check(items: list[dict[str, Any]]) -> None:
    """Check items that a client adds. Raises ApiError 400."""
    if len(items) > _MOST_AT_ONCE:
        raise invalid("items", f"at most {_MOST_AT_ONCE} items can be added at once")
    chat_messages(with_places("items", items), joined_name)


def _require_room(put: bool) -> None:
    if not put:
        raise queue_full()


async def _find(request: StrictRequest, id_: str) -> StoredAnswer:
    services, owner = services_and_owner(request)
    return await find_conversation(services, owner, id_, _PARAM)


async def _size(request: Request[Any, Any, Any]) -> int:
    return len(await request.body())


def _to_conversation(found: StoredAnswer) -> Conversation:
    return Conversation(id=found.id, created_at=found.answer["created_at"], metadata=dict(found.metadata))


def _no_item(id_: str) -> ApiError:
    return ApiError(404, f"There is no item {id_!r} in this conversation.", "item_not_found", "item_id")


conversations_router = Router(
    path="/",
    route_handlers=[
        create_conversation,
        get_conversation,
        update_conversation,
        delete_conversation,
        create_items,
        list_items,
        get_item,
        delete_item,
    ],
    opt={"access": Access.STORED},
    tags=["OpenAI"],
)


_INSTRUCTIONS = (
    "Summarize the conversation so far for whoever continues it: what was asked, what was done and found, "
    "decisions, names, numbers and places that will be needed, what is still open. Answer with that alone."
)
_ID = "resp_"


class CompactedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    """Messages of the user, then one `compaction`."""
    usage: ResponseUsage
    warnings: list[str] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class PreparedSummary:
    prepared: PreparedResponse
    kept: list[dict[str, Any]]


async def prepare_summary(call: RequestContext, data: CompactRequest) -> PreparedSummary:
    """Build the request for a summary. Items that do not fit are left out, oldest first. Raises ApiError."""
    refuse_unsupported(data)
    asked = "\n\n".join(filter(None, (_INSTRUCTIONS, data.instructions)))
    own = items_of(data.input)
    request = ResponseRequest(
        model=data.model,
        input=[*own, {"type": "message", "role": "user", "content": asked}],
        previous_response_id=data.previous_response_id,
        prompt_cache_key=data.prompt_cache_key,
        truncation="auto",
    )
    kept = [item for item in own if item.get("role") == "user"]
    return PreparedSummary(await prepare_response(call, request, None), kept)


async def summarize(gateway: Gateway, summary: PreparedSummary) -> CompactedResponse:
    chat = summary.prepared.chat
    parser = chat.parsing.parser()
    with gateway.open(chat.generation) as opened:
        parts = parser.parse_whole("".join([delta.text async for delta in opened.deltas()]))
    base = chat.generation.id.removeprefix(_ID)
    return CompactedResponse(
        id=chat.generation.id,
        created_at=opened.created,
        output=[*_with_ids(summary.kept, base), summary_item(f"cmp_{base}", parts.content)],
        usage=ResponseUsage.of(opened.usage, reasoning_tokens(opened, [parser])),
        warnings=chat.warnings_at_end(opened) or UNSET,
    )


def _with_ids(items: list[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    made = []
    for number, item in enumerate(items):
        content = item.get("content")
        parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        plain = {"type": "message", "status": "completed", **item, "content": parts}
        made.append({"id": f"msg_{base}_{number}", **plain})
    return made


@inference_route("/v1/responses", "createResponse")
async def responses(
    request: StrictRequest, data: Annotated[ResponseRequest, Body()]
) -> Response[ResponseObject]:
    """Generate the model's next turn as items; server-sent events with `stream`. Stored with `store: true`
    only.
    """
    call = await RequestContext.of(request)
    with call.recording_refusals():
        check_background(data)
        store = None
        if data.store:
            earlier = data.previous_response_id or ""
            store = Store.of(call, "response", data.metadata, items_of(data.input), earlier)
        prepared = await prepare_response(call, data, store)
    if data.background and store is not None:
        live = start_background(call, prepared, store)
        return EventStreamResponse(live.follow(), STREAM) if data.stream else Response(live.response())
    if data.stream:
        return EventStreamResponse(stream_response(call.gateway, prepared), STREAM)
    work = complete_response(call.gateway, prepared)
    return Response(await while_connected(request.receive, work))


@inference_route("/v1/responses/input_tokens", "countInputTokens")
async def input_tokens(request: StrictRequest, data: Annotated[InputTokensRequest, Body()]) -> InputTokens:
    """Count the tokens that the prompt of such a request would have."""
    call = await RequestContext.of(request)
    with call.recording_refusals():
        return InputTokens(input_tokens=await count_input_tokens(call, data))


@inference_route("/v1/responses/compact", "compactResponse")
async def compact(
    request: StrictRequest, data: Annotated[CompactRequest, Body()]
) -> Response[CompactedResponse]:
    """Return a shorter conversation: the user's messages, and a summary of the rest that the model writes."""
    return await answer(
        request,
        lambda call: prepare_summary(call, data),
        lambda call, made: summarize(call.gateway, made),
    )


responses_router = Router(
    path="/",
    route_handlers=[responses, input_tokens, compact, stored_responses_router, conversations_router],
    tags=["OpenAI"],
)
