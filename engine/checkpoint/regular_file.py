"""Opening of regular files only: reading a FIFO or a device from a model's folder could block forever."""

import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Final, Literal, overload

_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@overload
def open_regular(path: Path) -> BufferedReader: ...
@overload
def open_regular(path: Path, buffering: Literal[0]) -> FileIO: ...
def open_regular(path: Path, buffering: Literal[-1, 0] = -1) -> BufferedReader | FileIO:
    """Open a regular file, or a link to one, for reading bytes. Never blocks.

    Raises OSError; its `strerror` says what else the path is.
    """
    _require_regular(path, path.stat().st_mode)  # before it is opened: some devices act on that
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(path, os.fstat(handle).st_mode)
        raw = FileIO(handle)
        return raw if buffering == 0 else BufferedReader(raw)
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Read a whole regular file. Raises OSError, also for a file of more than `most` bytes."""
    with open_regular(path) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return data


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind} and not a regular file", str(path))
