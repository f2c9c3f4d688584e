"""`context_management`: parts of a conversation that are removed before the model reads it."""

from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ...errors import ApiError
from .request_types import ContextEdit, CountTokensRequest, MessageParam, RedactedThinkingBlock, ThinkingBlock

_CLEAR_THINKING = "clear_thinking_20251015"


@dataclass(slots=True)
class AppliedEdits:
    """Thinking blocks that were removed, one list for each turn; None where no edit was requested."""

    thoughts: list[list[str]] | None = None
    messages: list[MessageParam] = field(default_factory=list)

    def describe(self, count_tokens: Any) -> dict[str, Any] | None:
        """Build Anthropic's `context_management` field of an answer. `count_tokens` measures a text."""
        if self.thoughts is None:
            return None
        edit = {
            "type": _CLEAR_THINKING,
            "cleared_thinking_turns": len(self.thoughts),
            "cleared_input_tokens": sum(count_tokens("\n".join(turn)) for turn in self.thoughts),
        }
        return {"applied_edits": [edit] if self.thoughts else []}


def apply_edits(request: CountTokensRequest) -> AppliedEdits:
    """Apply the edits to the request's messages. Raises ApiError 400 for edits that are not
    supported here.
    """
    asked = request.context_management
    if asked is None:
        return AppliedEdits(messages=request.messages)
    thoughts: list[list[str]] = []
    messages = list(request.messages)
    for number, edit in enumerate(asked.edits or ()):
        if edit.type != _CLEAR_THINKING:
            raise ApiError(
                400,
                f"Edits of type {edit.type!r} are not supported, {_CLEAR_THINKING!r} is. Nothing is cut from "
                "conversations here: shorten them in the client.",
                code="unsupported_parameter",
                param=f"context_management.edits[{number}].type",
            )
        thoughts += _clear_thinking(messages, _count_kept_turns(edit, len(messages)))
    return AppliedEdits(thoughts, messages)


def _count_kept_turns(edit: ContextEdit, everything: int) -> int:
    keep = edit.keep
    if keep is None:
        return 1
    if keep == "all" or keep.type == "all":
        return everything
    return keep.value or 1


def _clear_thinking(messages: list[MessageParam], keep: int) -> list[list[str]]:
    """Remove thinking blocks from all turns but the latest `keep` that have some, in place. Returns them."""
    cleared: list[list[str]] = []
    for number in reversed(range(len(messages))):
        message = messages[number]
        if message.role != "assistant" or isinstance(message.content, str):
            continue
        rest = [b for b in message.content if not isinstance(b, ThinkingBlock | RedactedThinkingBlock)]
        if len(rest) == len(message.content):
            continue
        if keep:
            keep -= 1
            continue
        cleared.append([block.thinking for block in message.content if isinstance(block, ThinkingBlock)])
        messages[number] = structs.replace(message, content=rest)
    return cleared[::-1]
