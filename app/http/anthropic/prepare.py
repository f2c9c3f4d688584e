"""From a request of the Messages API to a checked chat."""

from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.gateway import model_limit
from ...text.system_messages import renders_late_system
from ..errors import NO_THREADS
from ..openai.chat import ChatCall, chat_ids
from ..openai.context import Call
from ..openai.messages import build_chat
from ..openai.prompt_ids import check_prompts
from ..openai.translated import chat_request, prepare_translated
from ..openai.unsupported import refuse_unsupported, unknown_fields
from .context_edits import AppliedEdits, apply_edits
from .conversation import has_late_system
from .fields import CountTokensRequest, MessagesRequest, OutputConfig
from .translate import chat_fields, output_format, prompt_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCall:
    chat: ChatCall
    context_management: dict[str, Any] | None
    """Edits that were applied; None where the request asked for none."""


async def prepare_message(call: Call, data: MessagesRequest) -> MessageCall:
    """Raises ApiError for everything that can be known before the engine has it."""
    edits, edited = _edited(data)
    assert isinstance(edited, MessagesRequest)
    late_system = await _renders_late_system(call, data)
    plain = chat_fields(edited, late_system=late_system)
    format_name = "output_config.format" if data.output_format is None else "output_format"
    names = {"response_format": format_name, "continue_final_message": "messages", "stop": "stop_sequences"}
    chat = await prepare_translated(call, plain, [], "msg_", names)
    generation = replace(chat.generation, max_tokens_clamped=True)
    _check_prompt(generation.model, len(generation.prompts[0]))
    warnings = [*_warnings(call, data, generation.model), *chat.warnings]
    return MessageCall(
        chat=replace(chat, generation=generation, warnings=warnings),
        context_management=await _described(edits, generation.model),
    )


async def count_prompt_tokens(call: Call, data: CountTokensRequest) -> tuple[int, int]:
    """Tokens of the prompt as it would be sent, and before any edit. Raises ApiError."""
    edits, edited = _edited(data)
    output_format(data)
    late_system = await _renders_late_system(call, data)
    model = await call.find_model(data.model)

    async def count(request: CountTokensRequest) -> int:
        body = chat_request(prompt_fields(request, late_system=late_system))
        ids = await chat_ids(call.gateway, model, build_chat(body, call.limits))
        check_prompts([ids], "messages", model)
        return len(ids)

    tokens = await count(edited)
    return tokens, await count(data) if edits.thoughts else tokens


def _edited(data: CountTokensRequest) -> tuple[AppliedEdits, CountTokensRequest]:
    if data.thread is not None:
        raise ApiError(
            400,
            "The value of 'thread' is not supported. Send the whole conversation each time.",
            code=NO_THREADS,
            param="thread",
        )
    refuse_unsupported(data)
    if data.output_config is not None:
        refuse_unsupported(data.output_config, "output_config.")
    edits = apply_edits(data)
    return edits, structs.replace(data, messages=edits.messages)


async def _renders_late_system(call: Call, data: CountTokensRequest) -> bool:
    if not has_late_system(data):
        return True
    model = await call.find_model(data.model)
    return await renders_late_system(model.text, call.gateway.templates)


def _check_prompt(model: LoadedModel, size: int) -> None:
    """In Anthropic's words, which its agents read to shorten a conversation by themselves."""
    if size >= (limit := model_limit(model)):
        raise ApiError(
            400,
            f"prompt is too long: {size} tokens > {limit - 1} maximum. Shorten it, or load the model with a "
            "larger context.",
            code="context_length_exceeded",
            param="messages",
        )


async def _described(edits: AppliedEdits, model: LoadedModel) -> dict[str, Any] | None:
    size = sum(len(text) for turn in edits.thoughts or () for text in turn)

    def count_tokens(text: str) -> int:
        return len(model.text.encode(text, add_special_tokens=False))

    return await model.text.off_loop(size, lambda: edits.describe(count_tokens))


def _warnings(call: Call, data: MessagesRequest, model: LoadedModel) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    found += unknown_fields(OutputConfig, call.plain.get("output_config") or {}, "output_config.")
    thinking = data.thinking
    if thinking is not None and thinking.budget_tokens is not None:
        found.append("'thinking.budget_tokens' has no effect: thoughts end when the model ends them.")
    config = data.output_config
    if config is not None and config.effort and "reasoning_effort" not in (model.text.chat_template or ""):
        found.append("'output_config.effort' has no effect: this model's chat template knows no levels.")
    if data.diagnostics:
        found.append("'diagnostics' has no effect: the log tells where a prefix ended (llmbox requests).")
    return found
