"""Stored chat completions: list, get, change, delete, and the messages that they answer."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from litestar import Router, delete, get, post
from litestar.params import Body, FromPath, FromQuery
from msgspec import Struct

from ...store.stored import StoredAnswer, StoredFilter
from ..guard import Access
from .context import HttpRequest
from .responses import ChatCompletion
from .stored_pages import (
    After,
    Deleted,
    Limit,
    Order,
    Page,
    not_found,
    page_after,
    page_of,
    services_and_owner,
)
from .storing import check_metadata

_PATH = "/v1/chat/completions/{completion_id:str}"


class StoredChatCompletion(ChatCompletion, kw_only=True):
    metadata: dict[str, str]


class ChatUpdate(Struct, kw_only=True):
    metadata: dict[str, str] | None
    """Takes the place of what there was."""


@get("/v1/chat/completions", name="stored_chats", operation_id="listChatCompletions")
async def stored_chats(
    request: HttpRequest,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    model: FromQuery[str | None] = None,
) -> Page:
    """Those that the caller has stored; `metadata[KEY]=VALUE` leaves those with all of these pairs."""
    services, owner = services_and_owner(request)
    want = StoredFilter(
        kind="chat",
        owner=owner,
        model=model,
        metadata=_metadata_of(request.query_params),
        after=after or "",
        newest_first=order == "desc",
        limit=limit + 1,
    )
    found = await services.stored.find(want)
    if found is None:
        raise not_found("chat completion", after or "", "after")
    return page_of([_told(each) for each in found], limit)


@get(_PATH, name="stored_chat", operation_id="getChatCompletion")
async def stored_chat(request: HttpRequest, completion_id: FromPath[str]) -> StoredChatCompletion:
    """One that the caller has stored."""
    told: StoredChatCompletion = _told(await _find(request, completion_id))
    return told


@post(_PATH, status_code=200, name="stored_chat_update", operation_id="updateChatCompletion")
async def update_chat(
    request: HttpRequest, completion_id: FromPath[str], data: Annotated[ChatUpdate, Body()]
) -> StoredChatCompletion:
    """Change its metadata."""
    services, owner = services_and_owner(request)
    metadata = data.metadata or {}
    check_metadata(metadata)
    if not await services.stored.update("chat", owner, completion_id, metadata):
        raise not_found("chat completion", completion_id, "completion_id")
    told: StoredChatCompletion = _told(await _find(request, completion_id))
    return told


@delete(_PATH, status_code=200, name="stored_chat_delete", operation_id="deleteChatCompletion")
async def delete_chat(request: HttpRequest, completion_id: FromPath[str]) -> Deleted:
    """Erase it, overwritten."""
    services, owner = services_and_owner(request)
    if not await services.stored.delete("chat", owner, completion_id):
        raise not_found("chat completion", completion_id, "completion_id")
    return Deleted(id=completion_id, object="chat.completion.deleted")


@get(_PATH + "/messages", name="stored_chat_messages", operation_id="getChatCompletionMessages")
async def chat_messages(
    request: HttpRequest,
    completion_id: FromPath[str],
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Page:
    """The messages that it answers."""
    found = await _find(request, completion_id)
    messages = [_message(f"{found.id}-{n}", message) for n, message in enumerate(found.input)]
    return page_after(messages, after, limit, order)


async def _find(request: HttpRequest, completion_id: str) -> StoredAnswer:
    services, owner = services_and_owner(request)
    found = await services.stored.get("chat", owner, completion_id)
    if found is None:
        raise not_found("chat completion", completion_id, "completion_id")
    return found


def _told(found: StoredAnswer) -> Any:
    """As it was answered then, though types may have grown since."""
    return {**found.answer, "metadata": found.metadata}


def _message(id_: str, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        content = "\n".join(part.get("text") or "" for part in parts)
    return {**message, "id": id_, "content": content, "content_parts": parts}


def _metadata_of(query: Mapping[str, str]) -> dict[str, str]:
    pairs = ((re.fullmatch(r"metadata\[(.+)\]", name, re.DOTALL), value) for name, value in query.items())
    metadata = {match[1]: value for match, value in pairs if match is not None}
    check_metadata(metadata)
    return metadata


stored_chats_router = Router(
    path="/",
    route_handlers=[stored_chats, stored_chat, update_chat, delete_chat, chat_messages],
    opt={"access": Access.STORED},
    tags=["OpenAI"],
)
