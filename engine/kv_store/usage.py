"""Use of the KV cache's folder: its files and who of them leaves first, and the file `usage`, the bytes of
all blocks and the lock under which they change.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TURN_END_SECONDS: Final = 86_400
"""Time by which blocks at the ends of turns are kept longer than others."""
TURN_END: Final = ".turn"
PART: Final = ".part"
LOCK_SECONDS: Final = 5.0
"""Longest wait for the lock."""
_POLL_SECONDS: Final = 0.01
_DIGITS: Final = 20
"""Digits of the number, always as many: one write of the same length replaces it."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """File of a block, as the folder lists it."""

    path: Path
    size: int
    used_ns: int

    @property
    def owner(self) -> str:
        return self.path.parent.name

    @property
    def rank(self) -> int:
        """Return the sort key of eviction, smallest first."""
        kept = TURN_END_SECONDS * 10**9 if self.path.suffix == TURN_END else 0
        return self.used_ns + kept


def list_blocks(models: Iterable[Path]) -> list[StoredBlock]:
    """List the files of all blocks in the folders of these models."""
    found = []
    for owner in (owner for model in models for owner in subfolders(model)):
        with contextlib.suppress(OSError), os.scandir(owner) as entries:
            for entry in entries:
                if entry.name.endswith(PART):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(StoredBlock(Path(entry.path), status.st_size, status.st_mtime_ns))
    return found


def evict(blocks: list[StoredBlock], most: int, over: str, share: int) -> int:
    """Remove blocks until at most `most` bytes are left, and at most `share` of the owner `over`. Returns the
    bytes of the rest.
    """
    blocks.sort(key=lambda block: block.rank)
    usage = sum(block.size for block in blocks)
    own = [block for block in blocks if block.owner == over]
    excess = sum(block.size for block in own) - share
    for block in own:
        if excess <= 0:
            break
        gone = _remove(block)
        excess, usage = excess - gone, usage - gone
    for block in blocks:
        if usage <= most:
            break
        usage -= _remove(block)
    return usage


def subfolders(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [child for child in path.iterdir() if child.is_dir() and not child.is_symlink()]
    return []


def _remove(block: StoredBlock) -> int:
    """Remove a file; return the bytes that are gone with it."""
    try:
        block.path.unlink()
    except FileNotFoundError:
        return block.size
    except OSError:
        return 0
    return block.size


class UsageFile:
    """Open file, locked. Nothing is truncated: a crash leaves the old number, the new one, or none."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    @contextlib.contextmanager
    def locked(cls, path: Path) -> Iterator["UsageFile"]:
        """Open the file, made if missing, and lock it. Raises OSError, also after `LOCK_SECONDS`."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(handle, path)
            yield cls(handle)
        finally:
            os.close(handle)

    @classmethod
    def glance(cls, path: Path) -> int | None:
        """Return the bytes without the lock, as any number read so may be old at once. Raises OSError."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(handle).read()
        finally:
            os.close(handle)

    def read(self) -> int | None:
        """Return the bytes; None if the file is empty or damaged."""
        text = os.pread(self._handle, 2 * _DIGITS, 0)
        number = text.removesuffix(b"\n")
        return int(number) if number != text and number.isdigit() else None

    def write(self, size: int) -> None:
        os.pwrite(self._handle, f"{max(0, size):0{_DIGITS}d}\n".encode(), 0)


def _lock(handle: int, path: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise OSError(errno.ETIMEDOUT, "another process keeps it locked", str(path)) from None
            time.sleep(_POLL_SECONDS)
        else:
            return
