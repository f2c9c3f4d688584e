"""The route of the Responses API."""

from dataclasses import replace
from typing import Annotated

from litestar import Response, Router, post
from litestar.params import Body

from ..disconnect import while_connected
from ..guard import Access
from ..openai.chat import ChatCall
from ..openai.context import Call, HttpRequest
from ..openai.translated import prepare_translated
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..sse import EventStreamResponse, StreamOptions
from .answers import ResponseObject
from .events import complete_response, error_event, stream_response
from .fields import FunctionTool, ResponseRequest
from .translate import chat_fields

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
    """The model's next turn as items; server-sent events with `stream`. Nothing is stored."""
    call = await Call.of(request)
    with call.recording_refusals():
        chat = await _prepared(call, data)
    if data.stream:
        return EventStreamResponse(stream_response(call.gateway, chat, data), _STREAM)
    work = complete_response(call.gateway, chat, data)
    return Response(await while_connected(request.receive, work))


async def _prepared(call: Call, data: ResponseRequest) -> ChatCall:
    refuse_unsupported(data)
    chat = await prepare_translated(call, chat_fields(data), _warnings(call, data), "resp", _NAMES)
    generation = replace(chat.generation, prompt_param="input", max_tokens_param="max_output_tokens")
    return replace(chat, generation=generation)


def _warnings(call: Call, data: ResponseRequest) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    for tool in call.plain.get("tools") or ():
        found += unknown_fields(FunctionTool, tool, "tools[].")
    if data.include:
        found.append("'include' has no effect: answers hold all there is.")
    if data.reasoning is not None and data.reasoning.effort not in {None, "none", "minimal"}:
        found.append("'reasoning.effort' only turns thinking on, or off with 'none', where the model can.")
    if data.text is not None and data.text.verbosity not in {None, "medium"}:
        found.append("'text.verbosity' has no effect.")
    return found


responses_router = Router(path="/", route_handlers=[responses], tags=["OpenAI"])
