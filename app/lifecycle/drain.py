"""Drain at the end of serving: open work may finish for a while, then it ends with an error object."""

import asyncio
from collections.abc import Callable

from ..errors import ApiError


class Drain:
    """Drain state, shared by signal handlers (`begin`), the server (waits) and responses (poll).

    `draining`: no new work, open work may finish. `expired`: open work ends now, with an error object.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.hurried = asyncio.Event()
        self.expired = False
        self._endless: set[Callable[[], None]] = set()

    @property
    def draining(self) -> bool:
        return self.begun.is_set()

    def begin(self) -> None:
        """Start the drain. A second call expires it in under a second."""
        if self.draining:
            self.hurried.set()
            return
        self.begun.set()
        for end in list(self._endless):
            end()

    def register_endless(self, end: Callable[[], None]) -> None:
        """Register a stream that never finishes by itself. `end` is called when the drain begins."""
        self._endless.add(end)

    def unregister_endless(self, end: Callable[[], None]) -> None:
        self._endless.discard(end)


def shutting_down() -> ApiError:
    """Error 503 that ends open work when the drain expires."""
    return ApiError(
        503, "llmbox is shutting down.", "shutting_down", None, "server_error", {"Retry-After": "5"}
    )
