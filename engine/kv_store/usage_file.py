"""File `usage` of the KV cache's folder: the bytes of all blocks, and the lock under which they change."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOCK_SECONDS: Final = 5.0
"""Longest wait for the lock."""
_POLL_SECONDS: Final = 0.01
_DIGITS: Final = 20
"""Digits of the number, always as many: one write of the same length replaces it."""


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
