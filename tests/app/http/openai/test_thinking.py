"""What `reasoning_effort` becomes for templates that know levels, a switch, or neither."""

import pytest

from llmbox.app.http.openai.request_types import Effort
from llmbox.app.http.openai.sampling import thinking_budget, with_effort
from llmbox.app.text.chat_template import Chat

SWITCH = "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}"
LEVELS = "{{- 'Reasoning: ' + reasoning_effort }}"


def chat(**kwargs: object) -> Chat:
    return Chat(messages=[{"role": "user", "content": "x"}], template_kwargs=dict(kwargs))


@pytest.mark.parametrize(
    ("effort", "on", "warnings"),
    [("none", False, 0), ("minimal", False, 1), ("low", True, 0), ("medium", True, 0), ("high", True, 0)],
)
def test_a_switch_is_turned(effort: Effort, on: bool, warnings: int) -> None:
    seen, told = with_effort(chat(), effort, SWITCH)
    assert seen.template_kwargs == {"enable_thinking": on}
    assert len(told) == warnings
    assert all("turns thinking off" in text for text in told)


def test_a_level_is_named() -> None:
    seen, told = with_effort(chat(), "low", LEVELS)
    assert (seen.template_kwargs, told) == ({"reasoning_effort": "low"}, [])


def test_what_the_request_tells_the_template_goes_first() -> None:
    seen, _ = with_effort(chat(enable_thinking=True, other=1), "none", SWITCH)
    assert seen.template_kwargs == {"enable_thinking": True, "other": 1}


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_no_choice_is_told(template: str | None) -> None:
    asked = chat()
    seen, told = with_effort(asked, "high", template)
    assert seen is asked
    assert "no effect" in told[0]


def test_nothing_said_changes_nothing() -> None:
    asked = chat()
    assert with_effort(asked, None, SWITCH) == (asked, [])


@pytest.mark.parametrize(
    ("asked", "effort", "template", "budget"),
    [
        (None, None, SWITCH, None),
        (7, "low", SWITCH, 7),
        (-1, "low", SWITCH, None),
        (None, "low", SWITCH, 1024),
        (None, "medium", "</think>", 8192),
        (None, "xhigh", "</think>", None),
        (None, "none", "</think>", 0),
        (None, "none", SWITCH, None),
        (None, "low", LEVELS, None),
    ],
)
def test_budgets(asked: int | None, effort: Effort | None, template: str, budget: int | None) -> None:
    assert thinking_budget(asked, effort, template) == budget


def test_a_model_that_always_thinks_is_not_warned_about() -> None:
    asked = chat()
    assert with_effort(asked, "low", "</think>") == (asked, [])
