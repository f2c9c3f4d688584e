"""Responses as they are generated, and stored ones: get, cancel, delete, and their input items."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any

import msgspec
from litestar import Response, Router, delete, get, post
from litestar.params import FromPath, QueryParameter

from ...errors import ApiError, unavailable, unsupported_parameter
from ...gateway.gateway import Gateway
from ...gateway.open_request import OpenRequest
from ...services import Services
from ...store.stored_answers import StoredAnswer
from ..auth.guard import Access, services_and_owner
from ..openai.request_context import RequestContext
from ..openai.sampling import invalid
from ..openai.stored import After, DeletedObject, Limit, Order, Store, StoredPage, not_found, page_after
from ..server.request import StrictRequest
from ..server.sse import EventStreamResponse, SseOptions
from .items import ResponseObject
from .request_types import ResponseRequest
from .translate import PreparedResponse
from .writer import CUTS, Event, ResponseEventWriter, replay, run


async def complete_response(gateway: Gateway, prepared: PreparedResponse) -> ResponseObject:
    with gateway.open(prepared.chat.generation) as opened:
        writer = ResponseEventWriter(opened, prepared)
        await write_whole(opened, writer)
    return writer.response()


async def write_whole(opened: OpenRequest, writer: ResponseEventWriter) -> None:
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
        writer = ResponseEventWriter(opened, prepared)
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
    data = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(data)


STREAM = SseOptions(last=b"", error=error_event)


def framed(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _all_framed(events: Iterator[Event]) -> bytes:
    return b"".join(map(framed, events))


class LiveResponse:
    """A response that is being generated. Its events are kept until it has ended: a reader may begin at any
    of them.
    """

    def __init__(self, writer: ResponseEventWriter) -> None:
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
        raise unsupported_parameter(
            "background",
            "The value of 'background' is not supported. It needs 'store': true: nothing is stored"
            " unless the request asks for it.",
        )


def queue_full() -> ApiError:
    """Build the error of an answer or of items that cannot be stored."""
    return unavailable(
        "The write queue of the disk is full. Try again later.", "request_log_unavailable", retry_after=5
    )


def start_background(call: RequestContext, prepared: PreparedResponse, store: Store) -> LiveResponse:
    """Store the response as `in_progress`, then start generating it. Raises ApiError."""
    opened = call.gateway.open(prepared.chat.generation)
    writer = ResponseEventWriter(opened, prepared)
    response = writer.response()
    if not writer.keep(response):
        full = queue_full()
        opened.end(full.status, full.code or "")
        raise full
    live = LiveResponse(writer)
    call.services.background.start((store.owner, response.id), live.write(opened), lambda: live)
    return live


_PATH = "/v1/responses/{response_id:str}"
_LOST = "The daemon stopped before this response had ended, or its end could not be stored."


@get(_PATH, operation_id="getResponse")
async def stored_response(
    request: StrictRequest,
    response_id: FromPath[str],
    stream: Annotated[bool, QueryParameter(description="As server-sent events.")] = False,
    starting_after: Annotated[
        int | None, QueryParameter(ge=0, description="With `stream`: only events behind this number.")
    ] = None,
) -> Response[ResponseObject]:
    """Return a response that the caller has stored, or that is being generated in the background."""
    services, owner = services_and_owner(request)
    after = -1 if starting_after is None else starting_after
    if not stream:
        if starting_after is not None:
            raise invalid("starting_after", "it is only allowed when 'stream' is true")
        return Response(await _now(services, owner, response_id))
    live: LiveResponse | None = services.background.look((owner, response_id))
    if live is not None:
        return EventStreamResponse(live.follow(after), STREAM)
    found = await _find(services, owner, response_id)
    return EventStreamResponse(_replay_events(found, after), STREAM)


@post(_PATH + "/cancel", status_code=200, operation_id="cancelResponse")
async def cancel_response(request: StrictRequest, response_id: FromPath[str]) -> Response[ResponseObject]:
    """Cancel a background response; the output that it already has stays."""
    services, owner = services_and_owner(request)
    await services.background.cancel((owner, response_id))
    result = await _now(services, owner, response_id)
    background = result["background"] if isinstance(result, dict) else result.background
    if not background:
        raise ApiError(
            400,
            "Only responses with 'background': true can be cancelled; others end with their connection.",
            code="response_not_in_background",
            param="response_id",
        )
    return Response(result)


@delete(_PATH, status_code=200, operation_id="deleteResponse")
async def delete_response(request: StrictRequest, response_id: FromPath[str]) -> DeletedObject:
    """Erase a response; its bytes are overwritten. One that is being generated is cancelled first."""
    services, owner = services_and_owner(request)
    await services.background.cancel((owner, response_id))
    if not await services.stored.delete("response", owner, response_id):
        raise not_found("response", response_id, "response_id")
    return DeletedObject(id=response_id, object="response")


@get(_PATH + "/input_items", operation_id="listInputItems")
async def input_items(
    request: StrictRequest,
    response_id: FromPath[str],
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> StoredPage:
    """List the input items of this request, not those of the responses before it."""
    services, owner = services_and_owner(request)
    found = await _find(services, owner, response_id)
    return page_after(_items(found), after, limit, order)


async def _now(services: Services, owner: str, response_id: str) -> Any:
    live: LiveResponse | None = services.background.look((owner, response_id))
    if live is not None:
        return live.response()
    return _require_ended(await _find(services, owner, response_id))


def _require_ended(found: StoredAnswer) -> dict[str, Any]:
    data = {name: value for name, value in found.answer.items() if name != CUTS}
    if _is_lost(found):
        data |= {"status": "failed", "error": {"code": "server_error", "message": _LOST}}
    return data


def _is_lost(found: StoredAnswer) -> bool:
    """Return whether an earlier daemon left a response unfinished."""
    return bool(found.answer["status"] == "in_progress")


async def _replay_events(found: StoredAnswer, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events after number `after`. The number of events of a lost response is unknown: its end
    follows the events that the reader has.
    """
    for event in replay(_require_ended(found), found.answer.get(CUTS, ())):
        if _is_lost(found) and event["type"] == "response.failed":
            event["sequence_number"] = max(event["sequence_number"], after + 1)
        if event["sequence_number"] > after:
            yield framed(event)


async def _find(services: Services, owner: str, response_id: str) -> StoredAnswer:
    found = await services.stored.get("response", owner, response_id)
    if found is None:
        raise not_found("response", response_id, "response_id")
    return found


def _items(found: StoredAnswer) -> list[dict[str, Any]]:
    """Return the items, each with an id: its own, unless two have the same."""
    items: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(found.input):
        own = item.get("id")
        id_ = own if isinstance(own, str) and own and own not in items else f"item_{found.id}_{number}"
        items[id_] = {"type": "message", **item, "id": id_}
        content = item.get("content")
        if isinstance(content, str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            items[id_]["content"] = [{"type": kind, "text": content}]
    return list(items.values())


stored_responses_router = Router(
    path="/",
    route_handlers=[stored_response, cancel_response, delete_response, input_items],
    opt={"access": Access.STORED},
    tags=["OpenAI"],
)
