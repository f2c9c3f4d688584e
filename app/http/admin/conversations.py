"""Conversations of the panel's chat: list, search, read, save, delete. Each caller has its own."""

import re
from typing import Any

from litestar import Request, delete, get, put
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, JSONBody

from ...errors import ApiError
from ...services import Services
from ...store.conversations import MOST_MESSAGES, ConversationBody, Conversations
from ..auth.guard import identity_of

_ID = re.compile(r"[A-Za-z0-9-]{8,64}")
MOST_TITLE = 200


@get("/conversations", name="admin_conversations")
async def conversations(request: Request[Any, Any, State], text: FromQuery[str] = "") -> dict[str, Any]:
    """List the caller's conversations that contain `text`, the last changed first."""
    store, owner = _store(request)
    return {"conversations": await store.list(owner, text.strip())}


@get("/conversations/{id_:str}", name="admin_conversation")
async def conversation(request: Request[Any, Any, State], id_: FromPath[str]) -> ConversationBody:
    store, owner = _store(request)
    found = await store.get(owner, id_)
    if found is None:
        raise _unknown(id_)
    return found


@put("/conversations/{id_:str}", status_code=200, name="admin_save_conversation")
async def save_conversation(
    request: Request[Any, Any, State], id_: FromPath[str], data: JSONBody[ConversationBody]
) -> dict[str, Any]:
    """Save a conversation, replacing one of the same id."""
    if not _ID.fullmatch(id_):
        raise ApiError(
            400, "The id of a conversation has 8 to 64 letters, digits and dashes.", "invalid_value", "id"
        )
    if not 1 <= len(data.title) <= MOST_TITLE:
        raise ApiError(400, f"A title has 1 to {MOST_TITLE} characters.", "invalid_value", "title")
    if len(data.messages) > MOST_MESSAGES:
        message = f"A conversation has at most {MOST_MESSAGES:,} messages. Begin a new one."
        raise ApiError(400, message, "invalid_value", "messages")
    known = {message.id for message in data.messages}
    if len(known) < len(data.messages) or not {message.parent for message in data.messages} <= known | {""}:
        message = "Each message needs an id of its own, and a parent among the messages."
        raise ApiError(400, message, "invalid_value", "messages")
    store, owner = _store(request)
    await store.put(owner, id_, data)
    return {"id": id_}


@delete("/conversations/{id_:str}", status_code=200, name="admin_delete_conversation")
async def delete_conversation(request: Request[Any, Any, State], id_: FromPath[str]) -> dict[str, Any]:
    store, owner = _store(request)
    if not await store.delete(owner, id_):
        raise _unknown(id_)
    return {"id": id_, "deleted": True}


def _store(request: Request[Any, Any, State]) -> tuple[Conversations, str]:
    services: Services = request.app.state.services
    return Conversations(services.request_log), services.security.owner_id(identity_of(request))


def _unknown(id_: str) -> ApiError:
    return ApiError(404, f"No conversation {id_[:64]!r} is known.", "not_found", "id")
