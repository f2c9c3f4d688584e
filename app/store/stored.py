"""Answers that their callers wanted stored, with what they answer: kept, found, changed and deleted.

Everything goes through the request log's writer thread, in order: what was stored is there for the next
question. Importable without SQLAlchemy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .errors import first_line
from .request_log import RequestLog

if TYPE_CHECKING:
    from sqlalchemy import Engine

Kind = Literal["response", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """Plain JSON values. An answer is its owner's: nobody else finds it."""

    kind: Kind
    owner: str
    """Id of the key that asked; empty for callers without one."""
    id: str
    created: float
    """Unix seconds."""
    model: str
    previous: str = ""
    """Id of the answer that this one goes on from."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    input: Sequence[Any]
    """Messages or items, of this request alone."""
    answer: Any
    """As it was sent. Anything that msgspec writes as a JSON object; read back it is a dictionary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFilter:
    """Which answers to list."""

    kind: Kind
    owner: str
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """All of these pairs."""
    after: str = ""
    """Id: only what follows it in this order."""
    newest_first: bool = False
    limit: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTotal:
    """What one owner has. Times are Unix seconds."""

    owner: str
    kind: Kind
    answers: int
    size: int
    oldest: float
    newest: float


class StoredAnswers:
    """Only to be used from the daemon's event loop."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def put(self, answer: StoredAnswer, size: int) -> bool:
        """Queue it for the disk, in place of one of the same id. Never blocks.

        `size`: bytes, roughly, that it takes while it waits. False: there is no room, and it is not stored.
        What is lost after that, to a full disk, is counted with the log's rows.
        """

        def write(engine: "Engine | None") -> None:
            from . import stored_queries  # noqa: PLC0415 - SQLAlchemy belongs to the store's threads

            if engine is None:
                self._log.drop(1, "the file cannot be opened")
                return
            try:
                self._log.wrote(stored_queries.put(engine, answer))
            except Exception as error:  # noqa: BLE001 - full disk, locked or damaged file
                self._log.drop(1, f"an answer cannot be stored: {first_line(error)}")

        return self._log.submit(write, size)

    async def get(self, kind: Kind, owner: str, id_: str) -> StoredAnswer | None:
        """Raises StoreError."""

        def read(engine: "Engine") -> StoredAnswer | None:
            from . import stored_queries  # noqa: PLC0415

            return stored_queries.get(engine, kind, owner, id_)

        return await self._log.ask(read)

    async def chain(self, kind: Kind, owner: str, id_: str, most: int) -> list[StoredAnswer]:
        """The answer and those that it goes on from, oldest first, the newest `most` of them.

        The first one names a `previous` where one is missing. Raises StoreError.
        """

        def read(engine: "Engine") -> list[StoredAnswer]:
            from . import stored_queries  # noqa: PLC0415

            return stored_queries.chain(engine, kind, owner, id_, most)

        return await self._log.ask(read)

    async def find(self, want: StoredFilter) -> list[StoredAnswer] | None:
        """None: there is no answer with the id `after`. Raises StoreError."""

        def read(engine: "Engine") -> list[StoredAnswer] | None:
            from . import stored_queries  # noqa: PLC0415

            return stored_queries.find(engine, want)

        return await self._log.ask(read)

    async def update(self, kind: Kind, owner: str, id_: str, metadata: Mapping[str, str]) -> bool:
        """Replace the metadata. False: there is no such answer. Raises StoreError."""

        def write(engine: "Engine") -> bool:
            from . import stored_queries  # noqa: PLC0415

            return stored_queries.update(engine, kind, owner, id_, metadata)

        return await self._log.ask(write)

    async def delete(self, kind: Kind, owner: str, id_: str) -> bool:
        """Its bytes are overwritten. False: there is no such answer. Raises StoreError."""

        def write(engine: "Engine") -> bool:
            from .database import give_back_space  # noqa: PLC0415
            from .stored_queries import delete  # noqa: PLC0415

            found = delete(engine, kind, owner, id_)
            if found:
                give_back_space(engine)  # copies in the write-ahead log go too, unless somebody reads it
            return found

        return await self._log.ask(write)

    async def erase_owners_but(self, known: frozenset[str]) -> int:
        """Forget what belongs to keys that are no more; returns how many. Raises StoreError."""

        def write(engine: "Engine") -> int:
            from .database import give_back_space  # noqa: PLC0415
            from .stored_queries import erase_owners_but  # noqa: PLC0415

            count = erase_owners_but(engine, known)
            if count:
                give_back_space(engine)
            return count

        return await self._log.ask(write)

    async def totals(self) -> list[StoredTotal]:
        """Of each owner and kind. Raises StoreError."""

        def read(engine: "Engine") -> list[StoredTotal]:
            from . import stored_queries  # noqa: PLC0415

            return stored_queries.totals(engine)

        return await self._log.ask(read)


def encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
