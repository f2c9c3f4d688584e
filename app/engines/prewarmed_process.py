"""Spare engine process that has imported everything and waits for a model.

Importing torch takes a second or more, which a load or a restart would otherwise wait for. The spare has no
model, does nothing, and ends with the daemon like every engine.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from llmbox.engine.ipc.spawn import Launch, Spawned, spawn

log = logging.getLogger("llmbox.engines")

_QUIET_SECONDS: Final = 3.0
"""Seconds without requests before a spare is started: importing takes a core for about a second."""
_PATIENCE: Final = 20
"""Most times that the start is put off because of running requests."""


class PrewarmedProcess:
    """Source of engine processes. Use it only from the event loop that first used it."""

    def __init__(
        self,
        launch: Launch,
        *,
        keep: bool,
        busy: Callable[[], bool] = lambda: False,
        first: Spawned | None = None,
    ) -> None:
        """`keep`: have one ready; `first` was started already; `busy` tells when to start none."""
        self._launch = launch
        self._keep = keep
        self._busy = busy
        self._spare = first
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> Spawned:
        """Take the spare, or spawn a process. Raises OSError."""
        spare, self._spare = self._spare, None
        if self._keep:
            self._later(_PATIENCE)
        if spare is not None:
            if spare.alive:
                return spare
            log.warning("the spare engine process has ended with code %s", spare.process.returncode)
            spare.discard()
        return spawn(self._launch)

    def close(self) -> None:
        self._keep = False
        if self._timer is not None:
            self._timer.cancel()
        if self._spare is not None:
            self._spare.discard()
            self._spare = None

    def _later(self, patience: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._prepare, patience)

    def _prepare(self, patience: int) -> None:
        self._timer = None
        if patience and self._busy():
            self._later(patience - 1)
        elif self._keep and self._spare is None:
            try:
                self._spare = spawn(self._launch)
            except OSError as error:
                log.warning("no spare engine process: %s", error)
