"""Responses generated from a chat, as events. The last event holds the whole response."""

from collections.abc import AsyncGenerator, Iterator

import msgspec

from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...gateway.open_request import OpenRequest
from ..server.sse import SseOptions
from .response_types import ResponseObject
from .writer import Event, PreparedResponse, Writer, run


async def complete_response(gateway: Gateway, prepared: PreparedResponse) -> ResponseObject:
    with gateway.open(prepared.chat.generation) as opened:
        writer = Writer(opened, prepared)
        await write_whole(opened, writer)
    return writer.response()


async def write_whole(opened: OpenRequest, writer: Writer) -> None:
    """Run the whole generation into `writer` without streaming. The response is read from the writer at the
    end.
    """
    try:
        async for delta in opened.deltas():
            run(writer.say(delta.text, delta.entries))
    except BaseException as error:
        run(writer.break_off(error))
        raise
    run(writer.finish())


async def stream_response(gateway: Gateway, prepared: PreparedResponse) -> AsyncGenerator[bytes, None]:
    with gateway.open(prepared.chat.generation) as opened:
        writer = Writer(opened, prepared)
        try:
            yield _all_framed(writer.begin())
            async for delta in opened.deltas():
                if said := _all_framed(writer.say(delta.text, delta.entries)):
                    yield said
        except BaseException as error:  # also GeneratorExit: the client left
            run(writer.break_off(error))
            raise
    yield _all_framed(writer.finish())


def error_event(error: ApiError) -> bytes:
    told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(told)


STREAM = SseOptions(last=b"", error=error_event)


def framed(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _all_framed(events: Iterator[Event]) -> bytes:
    return b"".join(map(framed, events))
