"""Answers of each caller on disk, beside the KV blocks of the same model: they outlive unloads and crashes.

    header   magic, version, number of tokens, digest of the model, name of the file, two checksums
    tokens   32-bit integers; an answer ends with -1

A file lies in its caller's folder of the KV cache, so it counts there and leaves with it: with `rm` of the
model, a purge of the key, `uninstall`. It appears by a rename. One thread reads and writes; no request waits
for it, and a file that is damaged, of another model or of another version is removed.
"""

import contextlib
import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ...kv_store.block_file import ADDRESS_BYTES, MODEL_BYTES
from ...kv_store.folder import KVFolder
from ...kv_store.usage import PART

log = logging.getLogger("llmbox.engine")

MAGIC: Final = b"LLMBOXSD"
VERSION: Final = 1
SUFFIX: Final = ".answers"
_FIELDS: Final = struct.Struct(f"<8sHHI{MODEL_BYTES}s{ADDRESS_BYTES}s")
_CHECKSUMS: Final = struct.Struct("<II")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUMS.size
MOST_BYTES: Final = 16 << 20
"""Bytes of all such files of a folder."""
MOST_FILE: Final = HEADER_BYTES + (4 << 16)
"""Bytes of one file: as many tokens as are kept of a caller."""
CHECKED: Final = 8
"""Files between two looks at how much all of them take."""
SAVE_SECONDS: Final = 2.0
"""Time after a new answer until it is written: so much a crash may lose."""
PAUSE_SECONDS: Final = 60.0
"""Time without writing after the disk refused it."""

Caller = tuple[str, str]
"""Tenant and cache namespace."""


class DamagedAnswers(Exception):  # noqa: N818 - dropped and counted
    """File is torn, changed, of another model or of another version."""


class AnswerFiles:
    """Files of one model in a `KVFolder`, which is open. All methods but the thread's are of the engine."""

    def __init__(
        self,
        folder: KVFolder,
        model: bytes,
        about: dict[str, Any],
        note_damage: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`, `about`: see `KVFolder.add_model`. `note_damage` counts a file that was removed because of
        its header, length or checksum.
        """
        self._note_damage = note_damage
        self._folder, self._model, self._about, self._clock = folder, model, about, clock
        self._root = folder.add_model(model, about)
        self._changed = threading.Condition()
        self._loads: deque[Caller] = deque()
        self._saves: dict[Caller, tuple[float, Callable[[], bytes | None]]] = {}
        """Time to write at, and what to call for the tokens then."""
        self._arrived: deque[tuple[Caller, array[int]]] = deque()
        self._paused_until = -1.0
        self._written = 0
        self._is_working = self._is_closed = False
        self._thread: threading.Thread | None = None

    def load(self, caller: Caller) -> None:
        """Start reading the answers of a caller; `take_loaded` returns them when they are read."""
        with self._changed:
            self._loads.append(caller)
            self._wake()

    @property
    def has_loaded(self) -> bool:
        return bool(self._arrived)

    def take_loaded(self) -> "tuple[Caller, array[int]] | None":
        """Return the tokens of a caller that have been read."""
        return self._arrived.popleft() if self._arrived else None

    def save(self, caller: Caller, tokens: Callable[[], bytes | None]) -> None:
        """Schedule the write of a caller's answers. The thread calls `tokens`."""
        with self._changed:
            if caller not in self._saves:
                self._saves[caller] = self._clock() + SAVE_SECONDS, tokens
                self._wake()

    def close(self, seconds: float) -> None:
        """Write what waits, for `seconds` at most, and end the thread."""
        with self._changed:
            self._saves = {caller: (0.0, tokens) for caller, (_, tokens) in self._saves.items()}
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._saves or self._is_working), seconds)
            self._is_closed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                task = self._next_task()
                while task is None:
                    if self._is_closed:
                        return
                    due = min((due for due, _ in self._saves.values()), default=None)
                    self._changed.wait(None if due is None else max(0.01, due - self._clock()))
                    task = self._next_task()
                self._is_working = True
            try:
                task()
            except Exception:
                log.exception("answers for drafts cannot be kept")

    def _next_task(self) -> Callable[[], None] | None:
        if self._is_closed:
            return None
        if self._loads:
            caller = self._loads.popleft()
            return lambda: self._read(caller)
        for caller, (due, tokens) in self._saves.items():
            if due <= self._clock():
                del self._saves[caller]
                return lambda: self._write(caller, tokens())
        return None

    def _path(self, caller: Caller) -> tuple[Path, bytes]:
        owner = self._folder.owner(caller[0])
        name = hashlib.sha256(b"answers\0" + caller[1].encode()).digest()
        address = self._folder.address(owner, "kv", name)
        return self._root / owner / f"{address.file_name}{SUFFIX}", address.digest

    def _read(self, caller: Caller) -> None:
        path, name = self._path(caller)
        try:
            tokens = _decode(_read_bytes(path), self._model, name)
        except FileNotFoundError:
            return
        except (DamagedAnswers, OSError) as damage:
            self._note_damage()
            log.warning("earlier answers for drafts are dropped, %s: %s", damage, path)
            self._remove(path)
            return
        self._arrived.append((caller, tokens))

    def _write(self, caller: Caller, tokens: bytes | None) -> None:
        if tokens is None or self._clock() < self._paused_until:
            return
        path, name = self._path(caller)
        data = _encode(tokens, self._model, name)
        try:
            self._make_room()
            if not self._folder.reserve(len(data)):
                self._paused_until = self._clock() + PAUSE_SECONDS
                return
            old = path.lstat().st_size if path.exists() else 0
            try:
                self._replace(path, data)
            except OSError:
                self._folder.release(len(data))
                raise
            self._folder.release(old)
        except OSError as error:
            self._paused_until = self._clock() + PAUSE_SECONDS
            log.warning("answers for drafts are not kept for now, %s: %s", error.strerror or error, path)

    def _make_room(self) -> None:
        """Remove the oldest files of all models and callers, where they take too much."""
        if self._written % CHECKED == 0:
            files = sorted(self._list(), key=lambda each: each[1])
            usage = sum(size for _, _, size in files)
            for path, _, size in files:
                if usage <= MOST_BYTES - CHECKED * MOST_FILE:
                    break
                self._remove(path)
                usage -= size
        self._written += 1

    def _list(self) -> list[tuple[Path, int, int]]:
        """Return path, time and bytes of all such files."""
        found = []
        for model in os.listdir(self._folder.root):  # noqa: PTH208 - there may be 100,000 names
            if len(model) != 2 * MODEL_BYTES:
                continue
            for owner in _names(self._folder.root / model):
                for name in _names(self._folder.root / model / owner):
                    if name.endswith(SUFFIX):
                        path = self._folder.root / model / owner / name
                        with contextlib.suppress(OSError):
                            status = path.lstat()
                            found.append((path, status.st_mtime_ns, status.st_size))
        return found

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.lstat().st_size
            path.unlink()
            self._folder.release(size)

    def _replace(self, path: Path, data: bytes) -> None:
        part = path.with_name(path.name + PART)
        try:
            _write_bytes(part, data)
        except FileNotFoundError:  # a caller's first file, or its folder was purged
            self._root = self._folder.add_model(self._model, self._about)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write_bytes(part, data)
        part.replace(path)


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - there may be 100,000 names
    except OSError:  # a file, or gone
        return []


def _write_bytes(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(handle, "wb") as stream:  # noqa: PTH123 - a descriptor
            stream.write(data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read_bytes(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(handle, "rb") as stream:  # noqa: PTH123 - a descriptor
        return stream.read(MOST_FILE + 1)


def _encode(tokens: bytes, model: bytes, name: bytes) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, 0, len(tokens) // 4, model, name)
    return fields + _checksums(fields, tokens) + tokens


def _decode(data: bytes, model: bytes, name: bytes) -> "array[int]":
    """Return the tokens of a file. Raises DamagedAnswers."""
    fields, tokens = data[: _FIELDS.size], data[HEADER_BYTES:]
    if len(data) > MOST_FILE or fields != _FIELDS.pack(MAGIC, VERSION, 0, len(tokens) // 4, model, name):
        raise DamagedAnswers("it is torn, or of another model or version")
    if data[_FIELDS.size : HEADER_BYTES] != _checksums(fields, tokens):
        raise DamagedAnswers("its checksum differs")
    found = array("i", tokens)
    if not found or found[-1] != -1 or min(found) < -1:
        raise DamagedAnswers("it holds no answers")
    return found


def _checksums(fields: bytes, tokens: bytes) -> bytes:
    return _CHECKSUMS.pack(zlib.crc32(tokens, zlib.crc32(fields)), zlib.adler32(tokens, zlib.adler32(fields)))
