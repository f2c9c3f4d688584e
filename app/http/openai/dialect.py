"""Chat and completion requests made from requests of other dialects."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import ApiError
from ..server.request import invalid
from .chat import ChatCall, prepare_chat
from .completions import CompletionCall, prepare_completion
from .request_context import RequestContext
from .request_types import ChatCompletionRequest, CompletionRequest


def chat_request(plain: dict[str, Any]) -> ChatCompletionRequest:
    """Decode and check `plain` as a chat request. Raises ApiError 400."""
    try:
        return msgspec.convert(plain, ChatCompletionRequest)
    except msgspec.ValidationError as error:  # bounds that are the chat's own
        raise invalid(str(error)) from None


async def prepare_translated_completion(
    call: RequestContext, plain: dict[str, Any], names: Mapping[str, str]
) -> CompletionCall:
    """Prepare a raw prompt of another dialect. See `prepare_translated`. The request log has it as a
    completion.
    """
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
    """Prepare a chat of another dialect. If content is kept, `plain` is what is kept. `warnings` come from
    that dialect. `names` maps the chat's fields to its own.
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
    found = [_renamed(each, names) for each in chat.warnings]
    return replace(chat, generation=generation, warnings=[*warnings, *found])


def _renamed(warning: str, names: Mapping[str, str]) -> str:
    """Name the field that the caller sent in a warning."""
    field = re.match(r"'(\w+)'", warning)
    if field is None or field[1] not in names:
        return warning
    return f"'{names[field[1]]}'{warning[field.end() :]}"


def _rename(error: ApiError, names: Mapping[str, str]) -> None:
    """Name the field that the caller sent in the error. A place inside it (`tools[0].name`) stays
    as it is.
    """
    param = error.param or ""
    field = re.match(r"\w*", param)
    name = names.get(field[0]) if field else None
    if field is not None and name is not None:
        error.message = error.message.replace(f"'{param}'", f"'{name}{param[field.end() :]}'")
        error.param = name + param[field.end() :]
