"""Requests of other dialects, as the chats and completions that mean the same."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import ApiError
from ..server.strict_json import invalid
from .chat import ChatCall, prepare_chat
from .completions import CompletionCall, prepare_completion
from .request_context import RequestContext
from .request_types import ChatCompletionRequest, CompletionRequest


def chat_request(plain: dict[str, Any]) -> ChatCompletionRequest:
    """`plain` checked. Raises ApiError 400."""
    try:
        return msgspec.convert(plain, ChatCompletionRequest)
    except msgspec.ValidationError as error:  # bounds that are the chat's own
        raise invalid(str(error)) from None


async def prepare_translated_completion(
    call: RequestContext, plain: dict[str, Any], names: Mapping[str, str]
) -> CompletionCall:
    """As `prepare_translated`, of a raw prompt; the log has it as the completion that it is."""
    body = msgspec.json.encode(plain)
    translated = replace(call, plain=plain, body=body, endpoint="/v1/completions")
    try:
        return await prepare_completion(translated, msgspec.convert(plain, CompletionRequest))
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except ApiError as error:
        _rename(error, names)
        raise


async def prepare_translated(
    call: RequestContext, plain: dict[str, Any], warnings: list[str], prefix: str, names: Mapping[str, str]
) -> ChatCall:
    """Where requests are kept, this one is kept as `plain`; `warnings` are of its own dialect, as are
    `names`, by those of the chat's fields.
    """
    translated = replace(call, plain=plain, body=msgspec.json.encode(plain))
    try:
        chat = await prepare_chat(translated, chat_request(plain), prefix=prefix)
    except ApiError as error:
        _rename(error, names)
        raise
    blamed = chat.generation.prompt_param, chat.generation.max_tokens_param
    prompt_param, max_tokens_param = (names.get(name, name) for name in blamed)
    generation = replace(chat.generation, prompt_param=prompt_param, max_tokens_param=max_tokens_param)
    return replace(chat, generation=generation, warnings=[*warnings, *chat.warnings])


def _rename(error: ApiError, names: Mapping[str, str]) -> None:
    """Blames the field that the caller sent. A place inside it (`tools[0].name`) stays as it is."""
    param = error.param or ""
    field = re.match(r"\w*", param)
    name = names.get(field[0]) if field else None
    if field is not None and name is not None:
        error.message = error.message.replace(f"'{param}'", f"'{name}{param[field.end() :]}'")
        error.param = name + param[field.end() :]
