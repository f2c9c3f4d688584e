"""The end of serving: first everything open may finish, then it ends with an error object."""

import asyncio
from collections.abc import Callable

from ..errors import ApiError


class Drain:
    """Shared by signal handlers (`begin`), the server (waits) and responses (look).

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
        """The first call starts the drain, a second one ends it in under a second."""
        if self.draining:
            self.hurried.set()
            return
        self.begun.set()
        for end in list(self._endless):
            end()

    def register_endless(self, end: Callable[[], None]) -> None:
        """`end` is called when the drain begins: for streams that never finish by themselves."""
        self._endless.add(end)

    def unregister_endless(self, end: Callable[[], None]) -> None:
        self._endless.discard(end)


def shutting_down() -> ApiError:
    return ApiError(
        503, "llmbox is shutting down.", "shutting_down", None, "server_error", {"Retry-After": "5"}
    )
