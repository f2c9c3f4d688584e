"""Compaction of a long conversation: the user's messages stay, a summary by the model replaces the rest."""

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ...gateway.gateway import Gateway
from ..openai.chat_parts import reasoning_tokens
from ..openai.request_context import RequestContext
from .items import summary_item
from .prepare import prepare_response
from .request_types import CompactRequest, ResponseRequest
from .response_types import ResponseUsage
from .translate import items_of
from .writer import PreparedResponse

_INSTRUCTIONS = (
    "Summarize the conversation so far for whoever goes on with it: what was asked, what was done and found, "
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
