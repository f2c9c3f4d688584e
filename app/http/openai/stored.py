"""Stored chat completions: list, get, update, delete, and their input messages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from litestar import Router, delete, get, post
from litestar.params import Body, FromPath, FromQuery, QueryParameter
from msgspec import Struct

from ...errors import ApiError, unsupported_parameter
from ...store.stored_answers import Kind, StoredAnswer, StoredAnswers, StoredFilter
from ..auth.guard import Access, services_and_owner
from ..server.request import StrictRequest
from .request_context import RequestContext
from .response_types import ChatCompletion
from .sampling import invalid

After = Annotated[str | None, QueryParameter(max_length=512, description="Id of the last one before.")]
Limit = Annotated[int, QueryParameter(ge=1, le=100)]
Order = FromQuery[Literal["asc", "desc"]]


class StoredPage(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedObject(Struct, kw_only=True):
    id: str
    object: str
    deleted: Literal[True] = True


def page_of(items: Sequence[dict[str, Any]], limit: int) -> StoredPage:
    """Build a page of the first `limit` items. One more item means that there is a next page."""
    shown = list(items[:limit])
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return StoredPage(data=shown, first_id=first, last_id=last, has_more=len(items) > limit)


def page_after(items: Sequence[dict[str, Any]], after: str | None, limit: int, order: Order) -> StoredPage:
    """Build the page after the cursor from all `items`, given oldest first. Raises ApiError 404 where `after`
    is none of them.
    """
    ordered = list(items if order == "asc" else reversed(items))
    if after is not None:
        place = next((n for n, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise not_found("item", after, "after")
        ordered = ordered[place + 1 :]
    return page_of(ordered, limit)


def not_found(what: str, id_: str, param: str, *, code: str | None = None) -> ApiError:
    """Build the 404 error: the same for an id that never was, was deleted, has expired or belongs to another
    key.
    """
    return ApiError(
        404,
        f"There is no stored {what} {id_!r} of yours. Only requests with 'store': true are stored.",
        code=code or f"{what.replace(' ', '_')}_not_found",
        param=param,
    )


NOT_STORED = "The answer could not be stored: the write queue of the disk is full."
_TOKEN_BYTES, _LOGPROB_BYTES = 16, 2000  # estimated, for each token of an answer
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # OpenAI's limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Storage slot for one request's answer."""

    answers: StoredAnswers
    kind: Kind
    owner: str
    input: Sequence[Any]
    metadata: Mapping[str, str]
    size: int
    """Bytes of the request."""
    previous: str = ""

    @classmethod
    def of(
        cls,
        call: RequestContext,
        kind: Kind,
        metadata: Mapping[str, str] | None,
        items: Sequence[Any],
        previous: str = "",
    ) -> "Store":
        """Return the slot. Raises ApiError 400 where nothing is stored here."""
        if not call.services.settings.requests.store:
            raise unsupported_parameter(
                "store",
                "The value of 'store' is not supported. Storing is switched off here: requests.store.",
            )
        metadata = metadata or {}
        check_metadata(metadata)
        return cls(
            answers=call.services.stored,
            kind=kind,
            owner=call.services.security.owner_id(call.caller),
            input=items,
            metadata=metadata,
            size=len(call.body),
            previous=previous,
        )

    def put(
        self,
        answer: Any,
        created: float,
        tokens: int,
        *,
        logprobs: bool = False,
        private: Mapping[str, Any] | None = None,
    ) -> bool:
        """Store the answer. It has an `id` and a `model` and must not change any more; `private` is kept
        beside it.

        Returns False where there is no room.
        """
        kept = StoredAnswer(
            kind=self.kind,
            owner=self.owner,
            id=answer.id,
            created=created,
            model=answer.model,
            previous=self.previous,
            metadata=self.metadata,
            input=self.input,
            answer=answer if private is None else {**msgspec.to_builtins(answer), **private},
        )
        return self.answers.put(kept, self.size + tokens * (_LOGPROB_BYTES if logprobs else _TOKEN_BYTES))


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check the metadata's size. Raises ApiError 400."""
    if len(metadata) > _MOST_PAIRS:
        raise invalid("metadata", f"at most {_MOST_PAIRS} pairs are allowed")
    for key, value in metadata.items():
        if len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            raise invalid(
                "metadata",
                f"keys have at most {_LONGEST_KEY} characters, values {_LONGEST_VALUE}",
            )


_PATH = "/v1/chat/completions/{completion_id:str}"


class StoredChatCompletion(ChatCompletion, kw_only=True):
    metadata: dict[str, str]


class ChatUpdate(Struct, kw_only=True):
    metadata: dict[str, str] | None
    """Replaces the stored metadata."""


@get("/v1/chat/completions", operation_id="listChatCompletions")
async def stored_chats(
    request: StrictRequest,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    model: FromQuery[str | None] = None,
) -> StoredPage:
    """List the caller's stored chats; `metadata[KEY]=VALUE` selects those with all of these pairs."""
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
    return page_of([_restore_answer(each) for each in found], limit)


@get(_PATH, operation_id="getChatCompletion")
async def stored_chat(request: StrictRequest, completion_id: FromPath[str]) -> StoredChatCompletion:
    """Return one of the caller's stored chats."""
    result: StoredChatCompletion = _restore_answer(await _find(request, completion_id))
    return result


@post(_PATH, status_code=200, operation_id="updateChatCompletion")
async def update_chat(
    request: StrictRequest, completion_id: FromPath[str], data: Annotated[ChatUpdate, Body()]
) -> StoredChatCompletion:
    """Change the metadata of a stored chat."""
    services, owner = services_and_owner(request)
    metadata = data.metadata or {}
    check_metadata(metadata)
    if not await services.stored.update("chat", owner, completion_id, metadata):
        raise not_found("chat completion", completion_id, "completion_id")
    result: StoredChatCompletion = _restore_answer(await _find(request, completion_id))
    return result


@delete(_PATH, status_code=200, operation_id="deleteChatCompletion")
async def delete_chat(request: StrictRequest, completion_id: FromPath[str]) -> DeletedObject:
    """Erase a stored chat; its bytes are overwritten."""
    services, owner = services_and_owner(request)
    if not await services.stored.delete("chat", owner, completion_id):
        raise not_found("chat completion", completion_id, "completion_id")
    return DeletedObject(id=completion_id, object="chat.completion.deleted")


@get(_PATH + "/messages", operation_id="getChatCompletionMessages")
async def chat_messages(
    request: StrictRequest,
    completion_id: FromPath[str],
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> StoredPage:
    """Return the messages that a stored chat answers."""
    found = await _find(request, completion_id)
    messages = [_message(f"{found.id}-{n}", message) for n, message in enumerate(found.input)]
    return page_after(messages, after, limit, order)


async def _find(request: StrictRequest, completion_id: str) -> StoredAnswer:
    services, owner = services_and_owner(request)
    found = await services.stored.get("chat", owner, completion_id)
    if found is None:
        raise not_found("chat completion", completion_id, "completion_id")
    return found


def _restore_answer(found: StoredAnswer) -> Any:
    """Return the answer as it was sent, even if its type has gained fields since."""
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
