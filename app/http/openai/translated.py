"""Requests of other dialects, as the chat requests that mean the same."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import ApiError
from .chat import ChatCall, prepare_chat
from .context import Call
from .fields import ChatCompletionRequest


def chat_request(plain: dict[str, Any]) -> ChatCompletionRequest:
    """`plain` checked. Raises ApiError 400."""
    try:
        return msgspec.convert(plain, ChatCompletionRequest)
    except msgspec.ValidationError as error:  # bounds that are the chat's own
        raise ApiError(400, f"Invalid value: {error}.", code="invalid_value") from None


async def prepare_translated(
    call: Call, plain: dict[str, Any], warnings: list[str], prefix: str, names: Mapping[str, str]
) -> ChatCall:
    """Where requests are kept, this one is kept as `plain`; `warnings` are of its own dialect, as are
    `names`, by those of the chat's fields.
    """
    translated = replace(call, plain=plain, body=msgspec.json.encode(plain))
    try:
        chat = await prepare_chat(translated, chat_request(plain), prefix=prefix)
    except ApiError as error:
        name = names.get(error.param or "")
        if name is not None:
            error.message = error.message.replace(f"'{error.param}'", f"'{name}'")
            error.param = name
        raise
    return replace(chat, warnings=[*warnings, *chat.warnings])
