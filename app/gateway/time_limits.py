"""Time limits of a request: at a deadline it ends with the answer so far, or with an error."""

import asyncio
import time
from collections.abc import Callable

from ..errors import ApiError
from .generation import Generation


def deadline_error(what: str, code: str) -> ApiError:
    """Error 503 of a missed deadline, so that a client may retry here or elsewhere."""
    return ApiError(
        503,
        f"The time limit of this request was over before {what}. Ask again later, or for a longer limit "
        "('timeout', 'first_token_timeout').",
        code=code,
        type="server_error",
        headers={"Retry-After": "2"},
    )


class TimeLimits:
    """Timers of one open request. Use them only from the event loop."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._has_tokens = False
        self.has_ended_answer = False
        """The answer was cut at `finish_by`: its streams end by `abort`, which is then no error."""

    def start(self, cancel: Callable[[ApiError | None], None]) -> None:
        """Start the timers. `cancel` ends the request's streams, with this error or with none."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        for name, at in (
            ("finish", self._generation.finish_by),
            ("first_token", self._generation.first_token_by),
        ):
            if at is not None:
                self._timers[name] = loop.call_later(max(0.0, at - now), self._expire, name, cancel)

    def note_token(self) -> None:
        self._has_tokens = True
        if (timer := self._timers.pop("first_token", None)) is not None:
            timer.cancel()

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, name: str, cancel: Callable[[ApiError | None], None]) -> None:
        if name == "first_token":
            cancel(deadline_error("its first token came", "first_token_timeout"))
        elif not self._has_tokens:
            cancel(deadline_error("its answer began", "request_timeout"))
        else:
            self.has_ended_answer = True
            self._generation.remarks.append("The answer was ended by the time limit of this request.")
            cancel(None)
