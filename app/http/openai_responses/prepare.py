"""Preparation of a Responses request: the conversation so far, its tools, and truncation to fit."""

from collections.abc import Sequence
from typing import Any

from ...engines.loaded_model import LoadedModel
from ...gateway.gateway import model_limit
from ..openai.chat import chat_ids
from ..openai.chat_messages import build_chat
from ..openai.completions import check_prompts
from ..openai.dialect import chat_request, prepare_translated
from ..openai.request_context import RequestContext
from ..openai.sampling import invalid
from ..openai.stored import Store
from ..openai.unsupported import refuse_unsupported, unknown_fields
from .request_types import PromptFields, ResponseRequest
from .tools import Placed, Toolbox, with_places
from .translate import LOGPROBS, append_to, chat_fields, items_before, items_of, prompt_fields
from .writer import PreparedResponse

_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_KEPT_ROLES = ("system", "developer")
_ANSWER_SHARE = 4
"""Divisor of the context: truncation leaves a quarter for an answer without a requested length."""


async def prepare_response(
    call: RequestContext, data: ResponseRequest, store: Store | None
) -> PreparedResponse:
    """Check a request and build its chat. Raises ApiError for every error that can be found before the engine
    has the request.
    """
    refuse_unsupported(data)
    conversation = await append_to(call, data)
    items, tools = await _conversation(call, data)
    warnings = [*_warnings(call, data), *tools.warnings]
    if data.truncation == "auto":
        model = await call.find_model(data.model)
        reserve = data.max_output_tokens or model_limit(model) // _ANSWER_SHARE
        kept = await _fitting(call, model, data, items, tools, reserve)
        if len(kept) < len(items):
            left_out = len(items) - len(kept)
            warnings.append(f"'truncation': the oldest {left_out} items were left out to fit the context.")
            items = kept
    chat = await prepare_translated(call, chat_fields(data, items, tools), warnings, "resp_", _NAMES)
    return PreparedResponse(data, chat, tools, store, conversation)


async def count_input_tokens(call: RequestContext, data: PromptFields) -> int:
    """Count the prompt's tokens as it would be sent. Raises ApiError."""
    refuse_unsupported(data)
    items, tools = await _conversation(call, data)
    model = await call.find_model(data.model)
    count = await _count(call, model, data, items, tools)
    if data.truncation != "auto" or count < model_limit(model):
        return count
    reserve = model_limit(model) // _ANSWER_SHARE
    return await _count(call, model, data, await _fitting(call, model, data, items, tools, reserve), tools)


async def _conversation(call: RequestContext, data: PromptFields) -> tuple[list[Placed], Toolbox]:
    at, before = await items_before(call, data)
    own = items_of(data.input)
    if not own and not before:
        raise invalid("input", "there must be at least one item")
    items = [*with_places(at, before), *with_places("input", own)]
    return items, Toolbox.of(data.tools or (), items)


async def _fitting(
    call: RequestContext,
    model: LoadedModel,
    data: PromptFields,
    items: Sequence[Placed],
    tools: Toolbox,
    reserve: int,
) -> list[Placed]:
    """Leave out the oldest items until the prompt leaves `reserve` tokens; the newest item always stays."""
    room = model_limit(model) - reserve
    low, high = 0, max(0, sum(map(_may_go, items)) - 1)
    while low < high:
        middle = (low + high) // 2
        if await _count(call, model, data, _without_oldest(items, middle), tools) <= room:
            high = middle
        else:
            low = middle + 1
    return _without_oldest(items, low)


async def _count(
    call: RequestContext, model: LoadedModel, data: PromptFields, items: Sequence[Placed], tools: Toolbox
) -> int:
    body = chat_request(prompt_fields(data, items, tools))
    ids = await chat_ids(call.gateway, model, build_chat(body, call.limits), call.caller.tenant)
    check_prompts([ids], "input", model)
    return len(ids)


def _without_oldest(items: Sequence[Placed], count: int) -> list[Placed]:
    """Leave out the oldest `count` items that may go, and the outputs of calls that are left out."""
    kept: list[Placed] = []
    called: set[Any] = set()
    for at, item in items:
        goes = _may_go((at, item))
        if goes and count > 0:
            count -= 1
            called.add(item.get("call_id"))
        elif not (str(item.get("type")).endswith("call_output") and item.get("call_id") in called):
            kept.append((at, item))
    return kept


def _may_go(placed: Placed) -> bool:
    item = placed[1]
    return item.get("role") not in _KEPT_ROLES and item.get("type") != "additional_tools"


def _warnings(call: RequestContext, data: ResponseRequest) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    if set(data.include or ()) - {LOGPROBS}:
        found.append(f"'include' has no effect but for {LOGPROBS!r}: answers hold all there is.")
    if data.text is not None and data.text.verbosity not in {None, "medium"}:
        found.append("'text.verbosity' has no effect.")
    return found
