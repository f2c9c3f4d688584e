"""Conversations, presets and MCP servers of the panel's chat. Importable without SQLAlchemy.

They stay until their owner deletes them: neither age nor the size of the request log removes one. Those of a
revoked key are deleted with what else it stored.

Values of headers and environment variables of MCP servers are secrets. They are in a file of mode 0600 beside
the API keys. The database has only their names, so that no copy of it (`llmbox db backup`) holds a secret.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ..errors import ApiError
from ..util.atomic_file import locked, write_whole
from . import queries as sql
from .writer import RequestLog

T = TypeVar("T", bound=Struct)

MOST_MESSAGES = 2000
"""Messages of one conversation, branches included."""


class ToolCallRecord(Struct, kw_only=True, forbid_unknown_fields=True):
    """Call of a tool of an MCP server, and its result."""

    id: str
    name: str
    """Name of the function that the model called."""
    server: str
    tool: str
    arguments: str
    """JSON, as the model wrote it."""
    result: str = ""
    state: Literal["done", "failed", "refused"] = "done"


class ToolRound(Struct, kw_only=True, forbid_unknown_fields=True):
    """Turn of the model that ended in calls; its answer comes after the results."""

    content: str = ""
    calls: Sequence[ToolCallRecord] = ()


ImageUrl = Annotated[
    str, Meta(max_length=700_000, pattern=r"^data:image/(jpeg|png|webp);base64,[A-Za-z0-9+/]+=*$")
]
"""Image as a `data:` URL, as the chat page makes it."""


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
    rounds: Sequence[ToolRound] = ()
    """Calls of tools before `content`."""
    images: Annotated[Sequence[ImageUrl], Meta(max_length=8)] = ()
    """Images of a question."""
    pair: str = ""
    """Id that two answers share that were asked for side by side."""


class ConversationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Conversation as the chat page saves it."""

    title: str
    model: str
    system: str = ""
    parameters: dict[str, float] = {}
    schema: str = ""
    """JSON schema that answers follow, as a text; empty for none."""
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
        return await self._log.ask(lambda engine: sql.conversations.list_of(engine, owner, text, limit))

    async def get(self, owner: str, id_: str) -> ConversationBody | None:
        return await self._log.ask(lambda engine: sql.conversations.get(engine, owner, id_))

    async def put(self, owner: str, id_: str, body: ConversationBody) -> None:
        """Save a conversation, replacing one of the same id."""
        await self._log.ask(lambda engine: sql.conversations.put(engine, owner, id_, body, time.time()))

    async def delete(self, owner: str, id_: str) -> bool:
        """Delete a conversation and overwrite its bytes. Returns False if there is no such conversation."""
        return await self._log.ask(lambda engine: sql.conversations.delete(engine, owner, id_))


_Texts = dict[Annotated[str, Meta(min_length=1, max_length=128)], Annotated[str, Meta(max_length=4096)]]


class ChatPreset(Struct, kw_only=True, forbid_unknown_fields=True):
    """System prompt, sampling settings and answer's schema under a name."""

    system: Annotated[str, Meta(max_length=100_000)] = ""
    parameters: dict[str, float] = {}
    schema: Annotated[str, Meta(max_length=100_000)] = ""
    """JSON schema that answers follow, as a text; empty for none."""


class ChatToolServer(Struct, kw_only=True, forbid_unknown_fields=True):
    """MCP server whose tools the chat may use: a URL, or a program that the daemon starts."""

    url: Annotated[str, Meta(max_length=2000)] = ""
    headers: _Texts = {}
    command: Annotated[Sequence[Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)] = ()
    """Program and arguments, started without a shell; empty for a server with a URL."""
    environment: _Texts = {}
    """Variables beside the few that every program gets."""
    allowed: bool = False
    """The chat may list and call its tools."""
    trusted: Sequence[str] = ()
    """Tools that the chat calls without asking."""


KINDS: Final[dict[type[Struct], str]] = {ChatPreset: "preset", ChatToolServer: "mcp_server"}


class PanelItems(Generic[T]):
    """Items of one kind. Use it only from the daemon's event loop. Every method may raise StoreError."""

    def __init__(self, log: RequestLog, kind: type[T]) -> None:
        self._log, self._type, self._kind = log, kind, KINDS[kind]

    async def all(self, owner: str) -> dict[str, T]:
        """Return an owner's items by name, in the order of names."""
        rows = await self._log.ask(lambda engine: sql.conversations.items_of(engine, owner, self._kind))
        return {name: msgspec.json.decode(body, type=self._type) for name, body in rows}

    async def put(self, owner: str, name: str, item: T) -> None:
        """Save an item, replacing one of the same name."""
        body = msgspec.json.encode(item).decode()
        await self._log.ask(lambda engine: sql.conversations.put_item(engine, owner, self._kind, name, body))

    async def delete(self, owner: str, name: str) -> bool:
        """Delete an item and overwrite its bytes. Returns False if there is no such item."""
        return await self._log.ask(
            lambda engine: sql.conversations.delete_item(engine, owner, self._kind, name)
        )


def encode_body(body: Struct) -> str:
    return msgspec.json.encode(body).decode()


log = logging.getLogger(__name__)

SCHEMA: Final = 1


class ServerSecrets(Struct, kw_only=True, forbid_unknown_fields=True):
    headers: dict[str, str] = {}
    environment: dict[str, str] = {}


_Secrets = dict[str, dict[str, ServerSecrets]]
"""Secrets by owner and server."""


class _SecretsFile(Struct):
    schema: int
    servers: _Secrets


def without_values(spec: ChatToolServer) -> ChatToolServer:
    """Return a server as the database has it: names of headers and variables with empty values."""
    return replace(
        spec, headers=dict.fromkeys(spec.headers, ""), environment=dict.fromkeys(spec.environment, "")
    )


def has_values(spec: ChatToolServer) -> bool:
    """Return whether the database has a server's secrets, as older versions wrote them."""
    return any([*spec.headers.values(), *spec.environment.values()])


@dataclass(frozen=True, slots=True)
class ToolServerSecrets:
    """The file. Every method reads or writes the disk, and raises ApiError 503 where it cannot."""

    file: Path

    def take_from(self, requests: RequestLog) -> None:
        """Have the secrets moved here that an older version left in the database, once that is open."""
        requests.submit(
            lambda engine: sql.conversations.move_secrets(engine, self),
            failed=lambda why: log.warning("secrets of MCP servers may stay in the request log: %s", why),
        )

    def save(self, owner: str, name: str, spec: ChatToolServer) -> None:
        """Keep a server's secrets in place of those kept before."""
        own = ServerSecrets(headers=dict(spec.headers), environment=dict(spec.environment))

        def change(kept: _Secrets) -> None:
            kept.setdefault(owner, {})[name] = own
            if not (own.headers or own.environment):
                del kept[owner][name]

        self._change(change)

    def remove(self, owner: str, name: str) -> None:
        self._change(lambda kept: kept.get(owner, {}).pop(name, None))

    def keep_owners(self, known: frozenset[str]) -> None:
        """Remove the secrets of keys that are not `known`. Those of the box's own user stay."""

        def change(kept: _Secrets) -> None:
            for owner in [each for each in kept if each and each not in known]:
                del kept[owner]

        self._change(change)

    def filled(self, owner: str, name: str, spec: ChatToolServer) -> ChatToolServer:
        """Return a server of the database with its secrets. Raises ApiError 409 where one is lost."""
        own = self._read().get(owner, {}).get(name) or ServerSecrets()
        lost = [each for each in spec.headers if each not in own.headers]
        lost += [each for each in spec.environment if each not in own.environment]
        if lost:
            raise ApiError(
                409,
                f"The value of {', '.join(lost)} is not on this machine (a restored database lacks it). "
                f"Remove the MCP server {name} under Tools in the chat and add it again.",
                "mcp_secret_missing",
                "name",
            )
        return replace(spec, headers=own.headers, environment=own.environment)

    def _read(self) -> _Secrets:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=_SecretsFile).servers
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._unusable(f"cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError:
            raise self._unusable("is damaged: move it away and enter the secrets again") from None

    def _change(self, change: Callable[[_Secrets], Any]) -> None:
        try:
            with locked(self.file.with_suffix(".lock")):
                kept = self._read()
                before = msgspec.json.encode(kept)
                change(kept)
                kept = {owner: servers for owner, servers in kept.items() if servers}
                if not kept:
                    self.file.unlink(missing_ok=True)
                elif msgspec.json.encode(kept) != before:
                    write_whole(self.file, msgspec.json.encode(_SecretsFile(SCHEMA, kept)))
        except OSError as error:
            raise self._unusable(f"cannot be written: {error.strerror}") from None

    def _unusable(self, why: str) -> ApiError:
        message = f"{self.file.name} in the data folder {why}."
        return ApiError(503, message, "mcp_secrets_unusable", None, "server_error")
