"""When each key was last used. Written now and then into a file of its own: losing it costs nothing."""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

import msgspec

log = logging.getLogger("llmbox.security")

EVERY = 60.0
"""Seconds between two writes while keys are in use."""


class LastUsed:
    """`note` is called for every request and costs a dictionary entry."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._times: dict[str, float] | None = None
        self._due: threading.Timer | None = None
        self._lock = threading.Lock()

    def note(self, key_id: str) -> None:
        self._known()[key_id] = time.time()
        if self._due is None:
            self._due = threading.Timer(EVERY, self.write)
            self._due.daemon = True
            self._due.start()

    def of(self, key_id: str) -> float | None:
        """Unix seconds."""
        return self._known().get(key_id)

    def forget(self, key_id: str) -> None:
        self._known().pop(key_id, None)

    def write(self) -> None:
        with self._lock:
            self._due = None
            fresh = self._file.with_suffix(".new")
            try:
                handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with open(handle, "wb") as out:  # noqa: PTH123 - a descriptor
                    out.write(msgspec.json.encode(dict(self._known())))
                fresh.replace(self._file)
            except OSError as error:
                with contextlib.suppress(OSError):
                    fresh.unlink(missing_ok=True)
                log.warning("when keys were last used could not be written: %s", error.strerror or error)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self.write()

    def _known(self) -> dict[str, float]:
        if self._times is None:
            try:
                self._times = msgspec.json.decode(self._file.read_bytes(), type=dict[str, float])
            except (OSError, msgspec.MsgspecError, UnicodeError):
                self._times = {}
        return self._times
