"""Files of a model's folder, which are not trusted: opened only if they are regular files, JSON parsed with
limits on size and depth.
"""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Final, Literal, overload

from ..errors import ModelError

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


MAX_BYTES: Final = 256 << 20
"""Maximum file size; the tokenizer of a vocabulary of 260,000 tokens has 35 MB."""
MAX_DEPTH: Final = 64

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def parse_json(data: bytes | str, pairs_hook: PairsHook | None = None) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(data, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if _is_too_deep(value):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def read_value(file: Path) -> Any:
    """Read a JSON file. Raises ModelError."""
    try:
        return parse_json(read_regular(file, MAX_BYTES))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: is this a Hugging Face model directory?") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}): download it again") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ModelError."""
    raw = read_value(file)
    if not isinstance(raw, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return raw


def _is_too_deep(value: Any) -> bool:
    """Return True if objects and lists are nested in more than `MAX_DEPTH` levels."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return False
    return True
