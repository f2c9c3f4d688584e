"""Thoughts of a chat: `reasoning_effort` for the template, their budget and their end for the engine."""

from dataclasses import replace
from typing import Any, Final

from llmbox.engine.sampling_params import SamplingParams, ThinkingParams

from ...text.chat_template import Chat
from ...text.output.format_table import recognize_format
from ...text.output.output_formats import HARMONY_ANSWER, HARMONY_TURN, OutputFormat, Thinking
from ...text.tokenizer.tokenizer import TextModel
from .request_types import Effort

_LEVELS, _SWITCH = "reasoning_effort", "enable_thinking"
_BUDGETS: Final[dict[str, int]] = {"low": 1024, "medium": 8192, "high": 24_576}
"""Tokens of thoughts for models whose templates know no levels. `xhigh` has no limit."""


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
    warnings: list[str]
    if _LEVELS in known:
        chosen, warnings = {_LEVELS: effort}, []
    elif _SWITCH in known:
        chosen, warnings = {_SWITCH: thinks(effort)}, []
        if effort == "minimal":
            warnings = ["'reasoning_effort': 'minimal' turns thinking off with this model."]
    elif recognize_format(template).reasoning is not None:
        return chat, []
    else:
        return chat, ["'reasoning_effort' has no effect: this model's chat template leaves no choice."]
    return replace(chat, template_kwargs=chosen | chat.template_kwargs), warnings


def thinking_budget(asked: int | None, effort: Effort | None, template: str | None) -> int | None:
    """Return the number of reasoning tokens after which an answer must begin; None: no limit.

    `asked`: the request's own number, -1 for none. Otherwise the effort stands for one, unless the template
    has words for it.
    """
    if asked is not None:
        return None if asked < 0 else asked
    known = template or ""
    if effort is None or _LEVELS in known:
        return None
    return _BUDGETS.get(effort) if thinks(effort) or _SWITCH in known else 0


def describe_thinking(
    format_: OutputFormat,
    begins: Thinking,
    text: TextModel,
    vocab_size: int,
    *,
    budget: int | None,
    stop_loops: bool,
) -> ThinkingParams | None:
    """Describe the thoughts of an answer for the engine; None for an answer without. Encodes short texts."""
    marks = format_.reasoning
    if marks is None or (begins == "no" and not marks.anywhere):
        return None

    def encode(mark: str) -> tuple[int, ...]:
        number = text.tokenizer.token_to_id(mark)
        ids = [number] if number is not None else text.encode(mark, add_special_tokens=False)
        return tuple(ids) if all(each < vocab_size for each in ids) else ()

    closer = text.tokenizer.token_to_id(marks.closer)
    return ThinkingParams(
        begins=begins,
        opener=marks.opener,
        closer=marks.closer,
        opener_ids=encode(marks.opener),
        closer_ids=() if closer is None or closer >= vocab_size else (closer,),
        end_ids=encode(marks.closer + HARMONY_ANSWER if format_.is_harmony else marks.closer),
        budget=budget,
        stop_loops=stop_loops,
        anywhere=marks.anywhere,
        ended_by_calls=format_.tools is not None and format_.tools.ends_thoughts,
    )


def within_grammar(params: SamplingParams, text: TextModel, *, calls_only: bool) -> SamplingParams:
    """Return parameters of an answer in harmony whose grammar describes the thoughts too. `calls_only`: the
    answer must be a call.
    """
    thinking = params.thinking
    if thinking is None or not text.output_format.is_harmony:
        return params
    ids = thinking.end_ids
    if calls_only:
        end = f"{thinking.closer}{HARMONY_TURN}<|channel|>commentary to=functions."
        ids = tuple(text.encode(end, add_special_tokens=False))
    return replace(params, thinking=replace(thinking, end_ids=ids, in_grammar=True))


def budget_warnings(asked: Any, thinking: ThinkingParams | None) -> list[str]:
    if asked is None or thinking is not None:
        return []
    return ["'thinking_token_budget' has no effect: this answer has no thoughts."]
