"""Atomic file replacement, and locks for one writer at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


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
