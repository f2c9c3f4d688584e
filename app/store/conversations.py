"""Conversations of the panel's chat. Importable without SQLAlchemy.

They stay until their owner deletes them: neither age nor the size of the request log removes one. Those of a
revoked key are deleted with what else it stored.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .writer import RequestLog

MOST_MESSAGES = 2000
"""Messages of one conversation, branches included."""


class ConversationMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """Message of a conversation, which is a tree: an edit or a second answer is another child."""

    id: str
    parent: str
    """Id of the message before it; empty for a first one."""
    role: Literal["user", "assistant"]
    content: str
    thoughts: str = ""
    model: str = ""
    measure: str = ""
    """Speed and tokens of an answer, as shown under it."""
    request: str = ""
    """Id of the request in the log."""


class ConversationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Conversation as the chat page saves it."""

    title: str
    model: str
    system: str = ""
    parameters: dict[str, float] = {}
    messages: Sequence[ConversationMessage] = ()
    leaf: str = ""
    """Last message of the branch on display."""


class ConversationSummary(Struct, kw_only=True, frozen=True):
    """Conversation in a list. Times are Unix seconds."""

    id: str
    title: str
    model: str
    created: float
    updated: float


class Conversations:
    """Use it only from the daemon's event loop. Every method may raise StoreError."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    async def list(self, owner: str, text: str = "", limit: int = 200) -> list[ConversationSummary]:
        """List an owner's conversations whose title or messages contain `text`, the last changed first."""
        return await self._log.ask(lambda engine: _sql().list_of(engine, owner, text, limit))

    async def get(self, owner: str, id_: str) -> ConversationBody | None:
        return await self._log.ask(lambda engine: _sql().get(engine, owner, id_))

    async def put(self, owner: str, id_: str, body: ConversationBody) -> None:
        """Save a conversation, replacing one of the same id."""
        await self._log.ask(lambda engine: _sql().put(engine, owner, id_, body, time.time()))

    async def delete(self, owner: str, id_: str) -> bool:
        """Delete a conversation and overwrite its bytes. Returns False if there is no such conversation."""
        return await self._log.ask(lambda engine: _sql().delete(engine, owner, id_))


def encode_body(body: ConversationBody) -> str:
    return msgspec.json.encode(body).decode()


def _sql() -> Any:
    from .queries import conversations  # noqa: PLC0415 - SQLAlchemy belongs to the store's threads

    return conversations
