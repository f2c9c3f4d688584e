"""From a chat that is generated to a response: as events, whose last one holds it whole."""

from collections.abc import AsyncGenerator, Iterator

import msgspec

from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...gateway.open_request import OpenRequest
from .answers import ResponseObject
from .writer import Event, PreparedResponse, Writer, run


async def complete_response(gateway: Gateway, prepared: PreparedResponse) -> ResponseObject:
    with gateway.open(prepared.chat.generation) as opened:
        writer = Writer(opened, prepared)
        await write_whole(opened, writer)
    return writer.response()


async def write_whole(opened: OpenRequest, writer: Writer) -> None:
    pieces: list[str] = []
    try:
        async for delta in opened.deltas():
            pieces.append(delta.text)  # noqa: PERF401 - those before an error count
    except BaseException as error:
        run(writer.say("".join(pieces)))
        writer.break_off(error)
        raise
    run(writer.say("".join(pieces)))
    run(writer.finish())


async def stream_response(gateway: Gateway, prepared: PreparedResponse) -> AsyncGenerator[bytes, None]:
    with gateway.open(prepared.chat.generation) as opened:
        writer = Writer(opened, prepared)
        try:
            yield _framed(writer.begin())
            async for delta in opened.deltas():
                if said := _framed(writer.say(delta.text)):
                    yield said
        except BaseException as error:  # also GeneratorExit: the client left
            writer.break_off(error)
            raise
    yield _framed(writer.finish())


def error_event(error: ApiError) -> bytes:
    told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(told)


def _framed(events: Iterator[Event]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )
