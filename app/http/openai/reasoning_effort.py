"""`reasoning_effort`, as far as a model's chat template lets it be chosen."""

from dataclasses import replace
from typing import Literal

from ...text.chat_template import Chat

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_LEVELS, _SWITCH = "reasoning_effort", "enable_thinking"


def thinks(effort: Effort) -> bool:
    """Where a model either thinks or does not."""
    return effort not in {"none", "minimal"}


def with_effort(chat: Chat, effort: Effort | None, template: str | None) -> tuple[Chat, list[str]]:
    """The chat as the template is to see it, and warnings. `chat_template_kwargs` of the request go first."""
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
