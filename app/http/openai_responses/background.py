"""`background: true`: a response that is generated without a waiting client, and may be watched."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from ...errors import ApiError
from ...gateway.open_request import OpenRequest
from ..openai.request_context import RequestContext
from ..openai.stored import Store
from .item_writer import Event
from .request_types import ResponseRequest
from .responder import framed
from .response_types import ResponseObject
from .writer import PreparedResponse, Writer


class LiveResponse:
    """A response that is being generated. Its events are kept until it has ended: a reader may begin at any
    of them.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._events: list[bytes] = []
        """Events by their sequence numbers."""
        self._ended = False
        self._more = asyncio.Event()

    def response(self) -> ResponseObject:
        return self._writer.response()

    async def write(self, opened: OpenRequest) -> None:
        with contextlib.suppress(ApiError), opened:  # the error is in what is stored
            try:
                self._add(self._writer.begin())
                async for delta in opened.deltas():
                    self._add(self._writer.say(delta.text, delta.entries))
                self._add(self._writer.finish())
            except BaseException as error:
                self._add(self._writer.break_off(error))
                raise
            finally:
                self._ended = True
                self._more.set()

    async def follow(self, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after number `starting_after`, up to the last one."""
        place = starting_after + 1
        while True:
            if place < len(self._events):
                new, place = self._events[place:], len(self._events)
                yield b"".join(new)
            elif self._ended:
                return
            else:
                self._more.clear()
                await self._more.wait()

    def _add(self, events: Iterator[Event]) -> None:
        self._events += [framed(event) for event in events]
        self._more.set()


def check_background(request: ResponseRequest) -> None:
    """Check the fields of a background response. Raises ApiError 400."""
    if request.background and not request.store:
        raise ApiError(
            400,
            "The value of 'background' is not supported. It needs 'store': true: here nothing is stored"
            " that was not asked for.",
            code="unsupported_parameter",
            param="background",
        )


def start_background(call: RequestContext, prepared: PreparedResponse, store: Store) -> LiveResponse:
    """Store the response as `in_progress`, then start generating it. Raises ApiError."""
    opened = call.gateway.open(prepared.chat.generation)
    writer = Writer(opened, prepared)
    response = writer.response()
    if not writer.keep(response):
        full = ApiError(
            503,
            "Too much waits for the disk.",
            "request_log_unavailable",
            type="server_error",
            headers={"Retry-After": "5"},
        )
        opened.end(full.status, full.code or "")
        raise full
    live = LiveResponse(writer)
    call.services.background.start((store.owner, response.id), live.write(opened), lambda: live)
    return live
