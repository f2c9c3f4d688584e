"""`reasoning_effort`, to the extent that a model's chat template supports it."""

from dataclasses import replace
from typing import Literal

from ...text.chat_template import Chat

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_LEVELS, _SWITCH = "reasoning_effort", "enable_thinking"


def thinks(effort: Effort) -> bool:
    """True if this effort turns thinking on in a template that has only a switch."""
    return effort not in {"none", "minimal"}


def with_effort(chat: Chat, effort: Effort | None, template: str | None) -> tuple[Chat, list[str]]:
    """Return the chat with the template variables of `effort`, and warnings. `chat_template_kwargs` of the
    request take precedence.
    """
    if effort is None:
        return chat, []
    known = template or ""
    chosen: dict[str, str | bool]
    if _LEVELS in known:
        chosen, warnings = {_LEVELS: effort}, []
    elif _SWITCH in known:
        chosen = {_SWITCH: thinks(effort)}
        warnings = [] if effort == "none" else [_switched(effort)]
    else:
        return chat, ["'reasoning_effort' has no effect: this model's chat template leaves no choice."]
    return replace(chat, template_kwargs=chosen | chat.template_kwargs), warnings


def _switched(effort: Effort) -> str:
    way = "on" if thinks(effort) else "off"
    return f"'reasoning_effort' only turns thinking on or off with this model: {effort!r} turns it {way}."
