"""Newest lines of the daemon's log as entries, for readers other than `llmbox logs`."""

from collections import deque
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_MOST_BYTES = 4_000_000


class LogEntry(Struct, frozen=True):
    """`time` is Unix seconds, 0 for lines that are not ours (a crash, a library)."""

    time: float
    level: str
    component: str
    message: str
    trace: str = ""


def tail(path: Path, count: int, level: str = "debug", component: str | None = None) -> list[LogEntry]:
    """Read the last `count` entries, oldest first, from at most the last 4 MB. Empty without a log."""
    wanted = LEVELS[LEVELS.index(level) :]
    kept: deque[LogEntry] = deque(maxlen=count)
    for raw in _last_bytes(path).splitlines():
        entry = _entry(raw)
        if entry is not None and entry.level in wanted and component in {None, entry.component}:
            kept.append(entry)
    return list(kept)


def _last_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - _MOST_BYTES)
            file.seek(start)
            data = file.read(_MOST_BYTES)
    except OSError:
        return b""
    return data.partition(b"\n")[2] if start else data  # the first line would be half a line


def _entry(raw: bytes) -> LogEntry | None:
    if not raw.strip():
        return None
    try:
        return msgspec.json.decode(raw, type=LogEntry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return LogEntry(0.0, "error", "stderr", raw.decode("utf-8", "replace"))
