"""Atomic file replacement, delayed writing, and locks for one writer at a time."""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)


def write_whole(file: Path, data: bytes) -> None:
    """Replace a file atomically and durably: after a power cut it is the old or the new one, never half."""
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(handle, "wb") as out:  # noqa: PTH123 - a descriptor
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the new file is in place all the same
            os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `file`, which is created if needed."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class DelayedFile:
    """File of values that change often: written at most every `every` seconds, and at `close`.

    `encode` makes its bytes, in another thread. A write that fails is a warning: what is in memory stays.
    """

    def __init__(self, file: Path, every: float, encode: Callable[[], bytes], what: str) -> None:
        self._file, self._every, self._encode, self._what = file, every, encode, what
        self._due: threading.Timer | None = None
        self._lock = threading.Lock()

    def touch(self) -> None:
        """Note that a value has changed. Costs a comparison while a write is due."""
        if self._due is None:
            self._due = threading.Timer(self._every, self.write)
            self._due.daemon = True
            self._due.start()

    def write(self) -> None:
        with self._lock:
            self._due = None
            fresh = self._file.with_suffix(".new")
            try:
                handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with open(handle, "wb") as out:  # noqa: PTH123 - a descriptor
                    out.write(self._encode())
                fresh.replace(self._file)
            except OSError as error:
                with contextlib.suppress(OSError):
                    fresh.unlink(missing_ok=True)
                log.warning("%s could not be written: %s", self._what, error.strerror or error)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self.write()
