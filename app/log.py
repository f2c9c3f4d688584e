"""Log of the daemon, written and read: one JSON object per line, rotated, mode 0600; in the foreground also
readable lines on stderr.

A background daemon's stdout and stderr lead into the same file, so that a library's crash is found there.
"""

import json
import logging
import os
import sys
import time
from collections import deque
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from .config.settings import LogSettings

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
QUIET = (
    "uvicorn",
    "uvicorn.access",
    "litestar",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "alembic",
    "sqlalchemy",
    "asyncio",
)


class JsonFormatter(logging.Formatter):
    """One record per line. json.dumps escapes control characters, whatever is in the data."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "component": component(record.name),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Readable lines for stderr."""

    def format(self, record: logging.LogRecord) -> str:
        text = (
            record.getMessage().encode("unicode_escape").decode() if "\x1b" in record.getMessage() else None
        )
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = (
            f"{stamp} {record.levelname.lower():7} {component(record.name):8} {text or record.getMessage()}"
        )
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class LogFile(RotatingFileHandler):
    """Rotating log file. `owns_stdio`: stdout and stderr follow to the new file after a rotation."""

    def __init__(self, path: Path, settings: LogSettings, *, owns_stdio: bool) -> None:
        self._owns_stdio = owns_stdio
        super().__init__(
            path, maxBytes=settings.file_bytes, backupCount=settings.files, encoding="utf-8", errors="replace"
        )
        self._take_stdio()

    def doRollover(self) -> None:  # noqa: N802 - the base class's name
        super().doRollover()
        self._take_stdio()

    def _take_stdio(self) -> None:
        if self._owns_stdio and self.stream is not None:
            os.dup2(self.stream.fileno(), 1)
            os.dup2(self.stream.fileno(), 2)


def component(logger: str) -> str:
    """Component of a logger: `engines` for `llmbox.app.engines.supervisor`; a library is its own name."""
    parts = logger.split(".")
    if parts[0] != "llmbox":
        return parts[0]
    inner = parts[2:] if parts[1:2] == ["app"] else parts[1:]
    return inner[0] if inner else "daemon"


def set_up(path: Path, settings: LogSettings, *, background: bool) -> None:
    """Install the handlers of the daemon's log."""
    root = logging.getLogger()
    root.handlers.clear()
    file = LogFile(path, settings, owns_stdio=background)
    file.setFormatter(JsonFormatter())
    root.addHandler(file)
    if not background:
        stderr = logging.StreamHandler(sys.stderr)
        stderr.setFormatter(TextFormatter())
        root.addHandler(stderr)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    logging.raiseExceptions = False  # a full disk must not print a traceback for every line
    set_level(settings)


def set_level(settings: LogSettings) -> None:
    """Apply the log level of the settings."""
    logging.getLogger().setLevel(LEVELS[settings.level])


LEVEL_NAMES: Final = ("debug", "info", "warning", "error", "critical")
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
    wanted = LEVEL_NAMES[LEVEL_NAMES.index(level) :]
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
