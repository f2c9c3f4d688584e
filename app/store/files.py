"""File store: files that clients upload, each beside its description, in a folder of the daemon's own.

A file is `file-….data` and `file-….json`; the latter is written last. Data without a description is left over
from an interrupted upload.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from ..errors import ApiError, unavailable

_ID = re.compile(r"file-[0-9a-f]{24}")
_CHUNK = 1 << 18
_DAY_S = 86_400
_LEFTOVER_S = 86_400
"""Seconds after which data without a description counts as left over."""


class StoredFile(Struct, frozen=True, kw_only=True):
    """Description of a file. Times are Unix seconds. Only its owner can find it."""

    id: str
    owner: str
    """Id of the key that uploaded it; empty for callers without one."""
    filename: str
    purpose: str
    size: int
    created: float
    expires: float | None = None


class FileStore:
    """Use it from the daemon's event loop; `sweep` may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int,
        days: float,
        owners: Callable[[], frozenset[str]] | None = None,
    ) -> None:
        """`most_bytes`: limit of one owner. `owners`: ids of the existing keys; files of other owners are
        erased.
        """
        self._folder = folder
        self._most_bytes = most_bytes
        self._days = days
        self._owners = owners
        self._adding = asyncio.Lock()

    async def add(
        self, source: IO[bytes], owner: str, filename: str, purpose: str, expires: float | None
    ) -> StoredFile:
        """Store all of `source`. Raises ApiError 400 if the owner's limit would be exceeded."""
        async with self._adding:
            return await asyncio.to_thread(self._add, source, owner, filename, purpose, expires)

    async def get(self, owner: str, id_: str) -> StoredFile | None:
        return await asyncio.to_thread(self._get, owner, id_)

    async def all(self, owner: str) -> list[StoredFile]:
        """Files of an owner, oldest first."""
        return await asyncio.to_thread(self._all, owner)

    async def delete(self, owner: str, id_: str) -> bool:
        """Delete a file. Returns False if there is no such file."""
        found = await self.get(owner, id_)
        if found is not None:
            await asyncio.to_thread(self._erase, id_)
        return found is not None

    def path(self, file: StoredFile) -> Path:
        return self._folder / f"{file.id}.data"

    async def chunks(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file."""
        stream = await asyncio.to_thread(self.path(file).open, "rb")
        with stream:
            while chunk := await asyncio.to_thread(stream.read, _CHUNK):
                yield chunk

    async def erase_before(self, moment: float) -> int:
        """Erase the files of all owners created before a Unix time. Returns their number."""

        def erase() -> int:
            old = [file.id for file in self._descriptions() if file.created < moment]
            for id_ in old:
                self._erase(id_)
            return len(old)

        return await asyncio.to_thread(erase)

    def sweep(self, now: float) -> None:
        """Erase files expired at a Unix time, files of keys that are gone, and left-overs of uploads."""
        owners = None if self._owners is None else self._owners()
        known = set()
        for file in self._descriptions():
            known.add(file.id)
            if self._is_over(file, now) or not (owners is None or file.owner in owners or not file.owner):
                self._erase(file.id)
        for path in self._folder.glob("*"):
            with contextlib.suppress(OSError):
                if path.stem not in known and now - path.stat().st_mtime > _LEFTOVER_S:
                    path.unlink()

    # ------------------------------------------------------------------ in threads

    def _add(
        self, source: IO[bytes], owner: str, filename: str, purpose: str, expires: float | None
    ) -> StoredFile:
        source.seek(0, os.SEEK_END)
        size = source.tell()
        source.seek(0)
        kept = sum(file.size for file in self._all(owner))
        if kept + size > self._most_bytes:
            raise ApiError(
                400,
                f"Your files hold {kept} bytes, and this one {size}: more than {self._most_bytes} "
                "(requests.file_bytes). Delete some.",
                code="file_storage_full",
                param="file",
            )
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            owner=owner,
            filename=filename,
            purpose=purpose,
            size=size,
            created=time.time(),
            expires=expires,
        )
        fresh = self._folder / f"{file.id}.new"
        try:
            with self.path(file).open("xb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
            fresh.write_bytes(msgspec.json.encode(file))
            fresh.replace(self._folder / f"{file.id}.json")
        except OSError as error:
            fresh.unlink(missing_ok=True)
            self._erase(file.id)
            raise unavailable(
                f"The file cannot be kept: {error.strerror or 'the disk refused it'}.",
                "file_storage_unavailable",
                retry_after=60,
            ) from error
        return file

    def _get(self, owner: str, id_: str) -> StoredFile | None:
        if _ID.fullmatch(id_) is None:
            return None
        file = _description(self._folder / f"{id_}.json")
        mine = file is not None and file.owner == owner and not self._is_over(file, time.time())
        return file if mine else None

    def _all(self, owner: str) -> list[StoredFile]:
        now = time.time()
        mine = [file for file in self._descriptions() if file.owner == owner and not self._is_over(file, now)]
        return sorted(mine, key=lambda file: (file.created, file.id))

    def _descriptions(self) -> Iterator[StoredFile]:
        for path in list(self._folder.glob("file-*.json")):
            file = _description(path)
            if file is not None:
                yield file

    def _is_over(self, file: StoredFile, now: float) -> bool:
        return now > min(file.created + self._days * _DAY_S, file.expires or float("inf"))

    def _erase(self, id_: str) -> None:
        for ending in ("json", "data"):
            (self._folder / f"{id_}.{ending}").unlink(missing_ok=True)


def _description(path: Path) -> StoredFile | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredFile)
    except (OSError, msgspec.MsgspecError):
        return None  # deleted meanwhile, or damaged: then the sweep takes it
