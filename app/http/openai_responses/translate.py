"""Translation of a Responses request to a chat: the conversation so far, its tools, truncation to fit.

`previous_response_id` and `conversation` are resolved to their items.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engines.loaded_model import LoadedModel
from ...errors import ApiError, unsupported_parameter
from ...gateway.gateway import model_limit
from ...services import Services
from ...store.stored_answers import StoredAnswer, StoredAnswers
from ..openai.chat import ChatCall, chat_ids, prepare_translated
from ..openai.chat_messages import build_chat
from ..openai.request_context import RequestContext, check_prompts
from ..openai.request_types import ChatCompletionRequest
from ..openai.sampling import invalid, thinks
from ..openai.stored import Store, not_found
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..server.request import convert
from .items import chat_messages
from .request_types import PromptFields, ResponseRequest
from .tools import Placed, Toolbox, joined_name, with_places

LOGPROBS = "message.output_text.logprobs"


def prompt_fields(request: PromptFields, items: Sequence[Placed], tools: Toolbox) -> dict[str, Any]:
    """Build the chat's prompt fields. `items`: of the whole conversation, with their places in the request.

    Raises ApiError 400 for items that are not for a text model.
    """
    messages = chat_messages(items, joined_name)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    given = {
        "model": request.model,
        "messages": messages,
        "tools": tools.chat or None,
        "tool_choice": tools.choice(request.tool_choice),
        "response_format": _format(request),
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    body = {name: value for name, value in given.items() if value is not None}
    effort = request.reasoning.effort if request.reasoning else None
    if effort is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinks(effort)}
    return body


def chat_fields(request: ResponseRequest, items: Sequence[Placed], tools: Toolbox) -> dict[str, Any]:
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    given = {
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": wants_logprobs or None,
        "top_logprobs": request.top_logprobs if wants_logprobs else None,
        "stream": request.stream,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
    }
    set_ones = {name: value for name, value in given.items() if value is not None}
    return {**prompt_fields(request, items, tools), **set_ones}


def items_of(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the input items. A plain text becomes a message."""
    if not isinstance(given, str):
        return given or []
    content = [{"type": "input_text", "text": given}]
    return [{"type": "message", "role": "user", "content": content}]


def _format(request: PromptFields) -> dict[str, Any] | None:
    asked = request.text.format if request.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema}}


_PREVIOUS, _CONVERSATION = "previous_response_id", "conversation"
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
_ITEM_BYTES = 16
"""Stored bytes of one answer token, estimated."""


@dataclass(frozen=True, slots=True)
class ConversationTarget:
    """Stored conversation to which a request and its answer are added."""

    answers: StoredAnswers
    owner: str
    id: str
    items: Sequence[dict[str, Any]]
    """Items of the request."""
    size: int

    def append(self, output: Sequence[dict[str, Any]], tokens: int) -> bool:
        """Append the output. Returns False where there is no room."""
        added = with_ids([*self.items, *output])
        return self.answers.append(
            "conversation", self.owner, self.id, added, self.size + tokens * _ITEM_BYTES
        )


async def items_before(call: RequestContext, data: PromptFields) -> tuple[str, list[dict[str, Any]]]:
    """Return the field that names the conversation, and its items so far, oldest first.

    Instructions are not part of it. Raises ApiError: 404 where something of the conversation is not there
    or not the caller's, 400 where its last response has not ended.
    """
    if data.previous_response_id is not None and data.conversation is not None:
        raise invalid(_PREVIOUS, f"it cannot be combined with '{_CONVERSATION}'")
    if data.conversation_id is not None:
        found = await find_conversation(call.services, _owner(call), data.conversation_id, _CONVERSATION)
        return _CONVERSATION, list(found.input)
    if data.previous_response_id is not None:
        return _PREVIOUS, await _chain(call, data.previous_response_id)
    return _PREVIOUS, []


async def append_to(call: RequestContext, data: PromptFields) -> ConversationTarget | None:
    """Return the conversation to append to. Raises ApiError 400 where storing is switched off, 404 where
    there is no such conversation.
    """
    if data.conversation_id is None:
        return None
    require_storing(call.services, _CONVERSATION)
    owner = _owner(call)
    items = items_of(data.input)
    found = await find_conversation(call.services, owner, data.conversation_id, _CONVERSATION)
    check_room(len(found.input) + len(items), call.limits.messages, _CONVERSATION)
    return ConversationTarget(call.services.stored, owner, found.id, items, len(call.body))


async def find_conversation(services: Services, owner: str, id_: str, param: str) -> StoredAnswer:
    found = await services.stored.get("conversation", owner, id_)
    if found is None:
        raise ApiError(404, f"There is no conversation {id_!r} of yours.", "conversation_not_found", param)
    return found


def require_storing(services: Services, param: str | None) -> None:
    """Check that storing is allowed: a conversation is explicit storage. Raises ApiError 400."""
    if not services.settings.requests.store:
        raise unsupported_parameter(
            param, "Conversations are not supported. Storing is switched off here: requests.store."
        )


def check_room(items: int, most: int, param: str) -> None:
    """Check the number of items. Raises ApiError 400."""
    if items > most:
        raise invalid(param, f"a conversation has at most {most} items")


def with_ids(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items as they are listed: each with a unique id, a status, and content in parts."""
    return [_with_id(item) for item in items]


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    made = {**item, "type": kind, "status": item.get("status") or "completed"}
    made["id"] = f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"
    if isinstance(content := item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": part, "text": content}]
    return made


async def _chain(call: RequestContext, previous: str) -> list[dict[str, Any]]:
    owner = _owner(call)
    if call.services.background.look((owner, previous)) is not None:
        raise ApiError(
            400, f"The response {previous!r} has not ended yet.", "response_in_progress", _PREVIOUS
        )
    most = call.limits.messages
    chain = await call.services.stored.chain("response", owner, previous, most)
    missing = chain[0].previous if chain else previous
    if missing and len(chain) == most:
        raise ApiError(400, f"A conversation has at most {most} responses.", "invalid_value", _PREVIOUS)
    if missing:
        raise not_found("response", missing, _PREVIOUS, code="previous_response_not_found")
    lost = next((turn.id for turn in chain if turn.answer["status"] == "in_progress"), None)
    if lost is not None:
        raise ApiError(
            400,
            f"The end of the response {lost!r} was lost, so it cannot be continued. Send all items as "
            "'input'.",
            "previous_response_lost",
            _PREVIOUS,
        )
    return [item for turn in chain for item in (*turn.input, *turn.answer["output"])]


def _owner(call: RequestContext) -> str:
    return call.services.security.owner_id(call.caller)


_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_KEPT_ROLES = ("system", "developer")
_ANSWER_SHARE = 4
"""Divisor of the context: truncation leaves a quarter for an answer without a requested length."""


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A checked request: the chat that generates its answer, and where the answer is stored."""

    request: ResponseRequest
    chat: ChatCall
    tools: Toolbox
    store: Store | None = None
    conversation: ConversationTarget | None = None


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
    body = convert(prompt_fields(data, items, tools), ChatCompletionRequest)
    ids = await chat_ids(call.gateway, model, build_chat(body, call.limits))
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
