"""The route that makes responses."""

from typing import Annotated

from litestar import Response, Router, post
from litestar.params import Body

from ..disconnect import while_connected
from ..guard import Access
from ..openai.context import Call, HttpRequest
from ..openai.storing import Store
from ..openai.translated import prepare_translated
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..sse import EventStreamResponse, StreamOptions
from .alone import begin_alone, check_background
from .answers import ResponseObject
from .conversation import items_before
from .events import complete_response, error_event, stream_response
from .fields import ResponseRequest
from .stored import stored_responses_router
from .tools import Toolbox
from .translate import all_items, chat_fields, items_of
from .writer import PreparedResponse

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_STREAM = StreamOptions(last=b"", error=error_event)


@post(
    "/v1/responses",
    status_code=200,
    opt={"access": Access.INFER},
    name="responses",
    operation_id="createResponse",
)
async def responses(
    request: HttpRequest, data: Annotated[ResponseRequest, Body()]
) -> Response[ResponseObject]:
    """The model's next turn as items; server-sent events with `stream`. Stored with `store: true` only."""
    call = await Call.of(request)
    with call.recording_refusals():
        refuse_unsupported(data)
        check_background(data)
        store = Store.wanted(call, "response", data, items_of(data), data.previous_response_id or "")
        prepared = await _prepared(call, data, store)
    if data.background and store is not None:
        return Response(begin_alone(call, prepared, store))
    if data.stream:
        return EventStreamResponse(stream_response(call.gateway, prepared), _STREAM)
    work = complete_response(call.gateway, prepared)
    return Response(await while_connected(request.receive, work))


async def _prepared(call: Call, data: ResponseRequest, store: Store | None) -> PreparedResponse:
    items = all_items(data, await items_before(call, data.previous_response_id))
    tools = Toolbox.of(data.tools or (), items)
    warnings = [*_warnings(call, data), *tools.warnings]
    chat = await prepare_translated(call, chat_fields(data, items, tools), warnings, "resp_", _NAMES)
    return PreparedResponse(data, chat, tools, store)


def _warnings(call: Call, data: ResponseRequest) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    if data.include:
        found.append("'include' has no effect: answers hold all there is.")
    if data.reasoning is not None and data.reasoning.effort not in {None, "none", "minimal"}:
        found.append("'reasoning.effort' only turns thinking on, or off with 'none', where the model can.")
    if data.text is not None and data.text.verbosity not in {None, "medium"}:
        found.append("'text.verbosity' has no effect.")
    return found


responses_router = Router(path="/", route_handlers=[responses, stored_responses_router], tags=["OpenAI"])
