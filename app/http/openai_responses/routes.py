"""Routes that generate responses."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from litestar import Response, Router
from litestar.params import Body
from msgspec import UNSET, Struct, UnsetType

from ...gateway.gateway import Gateway
from ..openai.chat_messages import reasoning_tokens
from ..openai.request_context import HttpRequest, RequestContext, answer, inference_route
from ..openai.stored import Store
from ..openai.unsupported import refuse_unsupported
from ..server.sse import EventStreamResponse, while_connected
from .conversations import conversations_router
from .items import InputTokens, ResponseObject, ResponseUsage, summary_item
from .request_types import CompactRequest, InputTokensRequest, ResponseRequest
from .stored import (
    STREAM,
    check_background,
    complete_response,
    start_background,
    stored_responses_router,
    stream_response,
)
from .translate import PreparedResponse, count_input_tokens, items_of, prepare_response

_INSTRUCTIONS = (
    "Summarize the conversation so far for whoever continues it: what was asked, what was done and found, "
    "decisions, names, numbers and places that will be needed, what is still open. Answer with that alone."
)
_ID = "resp_"


class CompactedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    """Messages of the user, then one `compaction`."""
    usage: ResponseUsage
    warnings: list[str] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class PreparedSummary:
    prepared: PreparedResponse
    kept: list[dict[str, Any]]


async def prepare_summary(call: RequestContext, data: CompactRequest) -> PreparedSummary:
    """Build the request for a summary. Items that do not fit are left out, oldest first. Raises ApiError."""
    refuse_unsupported(data)
    asked = "\n\n".join(filter(None, (_INSTRUCTIONS, data.instructions)))
    own = items_of(data.input)
    request = ResponseRequest(
        model=data.model,
        input=[*own, {"type": "message", "role": "user", "content": asked}],
        previous_response_id=data.previous_response_id,
        prompt_cache_key=data.prompt_cache_key,
        truncation="auto",
    )
    kept = [item for item in own if item.get("role") == "user"]
    return PreparedSummary(await prepare_response(call, request, None), kept)


async def summarize(gateway: Gateway, summary: PreparedSummary) -> CompactedResponse:
    chat = summary.prepared.chat
    parser = chat.parsing.parser()
    with gateway.open(chat.generation) as opened:
        parts = parser.push("".join([delta.text async for delta in opened.deltas()]))
    parts.add(parser.finish())
    base = chat.generation.id.removeprefix(_ID)
    return CompactedResponse(
        id=chat.generation.id,
        created_at=opened.created,
        output=[*_with_ids(summary.kept, base), summary_item(f"cmp_{base}", parts.content)],
        usage=ResponseUsage.of(opened.usage, reasoning_tokens(opened, [parser])),
        warnings=chat.warnings_at_end(opened) or UNSET,
    )


def _with_ids(items: list[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    made = []
    for number, item in enumerate(items):
        content = item.get("content")
        parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        plain = {"type": "message", "status": "completed", **item, "content": parts}
        made.append({"id": f"msg_{base}_{number}", **plain})
    return made


@inference_route("/v1/responses", "responses", "createResponse")
async def responses(
    request: HttpRequest, data: Annotated[ResponseRequest, Body()]
) -> Response[ResponseObject]:
    """Generate the model's next turn as items; server-sent events with `stream`. Stored with `store: true`
    only.
    """
    call = await RequestContext.of(request)
    with call.recording_refusals():
        check_background(data)
        store = Store.wanted(call, "response", data, items_of(data.input), data.previous_response_id or "")
        prepared = await prepare_response(call, data, store)
    if data.background and store is not None:
        live = start_background(call, prepared, store)
        return EventStreamResponse(live.follow(), STREAM) if data.stream else Response(live.response())
    if data.stream:
        return EventStreamResponse(stream_response(call.gateway, prepared), STREAM)
    work = complete_response(call.gateway, prepared)
    return Response(await while_connected(request.receive, work))


@inference_route("/v1/responses/input_tokens", "response_input_tokens", "countInputTokens")
async def input_tokens(request: HttpRequest, data: Annotated[InputTokensRequest, Body()]) -> InputTokens:
    """Count the tokens that the prompt of such a request would have."""
    call = await RequestContext.of(request)
    with call.recording_refusals():
        return InputTokens(input_tokens=await count_input_tokens(call, data))


@inference_route("/v1/responses/compact", "response_compact", "compactResponse")
async def compact(
    request: HttpRequest, data: Annotated[CompactRequest, Body()]
) -> Response[CompactedResponse]:
    """Return a shorter conversation: the user's messages, and a summary of the rest that the model writes."""
    return await answer(
        request,
        lambda call: prepare_summary(call, data),
        lambda call, made: summarize(call.gateway, made),
    )


responses_router = Router(
    path="/",
    route_handlers=[responses, input_tokens, compact, stored_responses_router, conversations_router],
    tags=["OpenAI"],
)
