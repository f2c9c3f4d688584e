"""Stored answers of the chat and Responses APIs. Importable without SQLAlchemy."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from . import queries as sql
from .writer import RequestLog

if TYPE_CHECKING:
    from sqlalchemy import Engine

Kind = Literal["response", "chat", "conversation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """Stored answer as plain JSON values. Only its owner can find it."""

    kind: Kind
    owner: str
    """Id of the key that asked; empty for callers without one."""
    id: str
    created: float
    """Unix seconds."""
    model: str
    previous: str = ""
    """Id of the answer that this one continues."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    input: Sequence[Any]
    """Messages or items of this request alone."""
    answer: Any
    """The answer as sent. Anything that msgspec writes as a JSON object; read back it is a dictionary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFilter:
    """Filter of answers to list."""

    kind: Kind
    owner: str
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Pairs that must all match."""
    after: str = ""
    """Answer id: list only those after it in this order."""
    newest_first: bool = False
    limit: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTotal:
    """Totals of one owner. Times are Unix seconds."""

    owner: str
    kind: Kind
    answers: int
    size: int
    oldest: float
    newest: float


class StoredAnswers:
    """Use it only from the daemon's event loop. Every awaited method may raise StoreError."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def put(self, answer: StoredAnswer, size: int) -> bool:
        """Queue an answer for the disk, replacing one of the same id. Never blocks.

        `size`: approximate bytes that it takes while it waits. Returns False if the queue has no room; then
        it is not stored. Answers lost later, to a full disk, are counted with the log's rows.
        """
        return self._submit(answer.owner, size, lambda engine: sql.stored_answers.put(engine, answer))

    def append(self, kind: Kind, owner: str, id_: str, items: Sequence[Any], size: int) -> bool:
        """Queue further `input` of a stored answer, whose age then starts again. Otherwise as `put`.

        Does nothing if it was deleted meanwhile.
        """
        return self._submit(
            owner,
            size,
            lambda engine: sql.stored_answers.append(engine, kind, owner, id_, items, time.time()),
        )

    def _submit(self, owner: str, size: int, work: "Callable[[Engine], int]") -> bool:
        def write(engine: "Engine") -> None:
            owners = self._log.keep.owners
            if owner and owners is not None and owner not in owners():
                return  # its key was revoked while it was generated
            self._log.wrote(work(engine))

        failed = lambda why: self._log.drop(1, f"an answer cannot be stored: {why}")  # noqa: E731
        return self._log.submit(write, size, failed=failed)

    async def remove_item(self, kind: Kind, owner: str, id_: str, item: str) -> bool:
        """Delete an item of its `input` and overwrite it. Returns False if there is no such item."""
        return await self._log.ask(
            lambda engine: sql.stored_answers.remove_item(engine, kind, owner, id_, item)
        )

    async def get(self, kind: Kind, owner: str, id_: str) -> StoredAnswer | None:
        return await self._log.ask(lambda engine: sql.stored_answers.get(engine, kind, owner, id_))

    async def chain(self, kind: Kind, owner: str, id_: str, most: int) -> list[StoredAnswer]:
        """The answer and those that it continues, oldest first, at most the newest `most` of them.

        If one is missing, the first one returned names it as `previous`.
        """
        return await self._log.ask(lambda engine: sql.stored_answers.chain(engine, kind, owner, id_, most))

    async def find(self, want: StoredFilter) -> list[StoredAnswer] | None:
        """List answers. None: there is no answer with the id `after`."""
        return await self._log.ask(lambda engine: sql.stored_answers.find(engine, want))

    async def update(self, kind: Kind, owner: str, id_: str, metadata: Mapping[str, str]) -> bool:
        """Replace the metadata. Returns False if there is no such answer."""
        return await self._log.ask(
            lambda engine: sql.stored_answers.update(engine, kind, owner, id_, metadata)
        )

    async def delete(self, kind: Kind, owner: str, id_: str) -> bool:
        """Delete an answer and overwrite its bytes, unless another reader holds the file. False: there is no
        such answer.
        """
        return await self._log.ask(lambda engine: sql.stored_answers.delete(engine, kind, owner, id_))

    async def erase_owners_but(self, known: frozenset[str]) -> int:
        """Delete everything of keys that no longer exist. Returns the number of rows."""
        return await self._log.ask(lambda engine: sql.stored_answers.erase_owners_but(engine, known))

    async def totals(self) -> list[StoredTotal]:
        """Totals of each owner and kind."""
        return await self._log.ask(lambda engine: sql.stored_answers.totals(engine))  # noqa: PLW0108 - it imports


def encode_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
