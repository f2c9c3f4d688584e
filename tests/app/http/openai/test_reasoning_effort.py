"""What `reasoning_effort` becomes for templates that know levels, a switch, or neither."""

import pytest

from llmbox.app.http.openai.chat_messages import with_effort
from llmbox.app.http.openai.request_types import Effort
from llmbox.app.text.chat_template import Chat

SWITCH = "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}"
LEVELS = "{{- 'Reasoning: ' + reasoning_effort }}"


def chat(**kwargs: object) -> Chat:
    return Chat(messages=[{"role": "user", "content": "x"}], template_kwargs=dict(kwargs))


@pytest.mark.parametrize(
    ("effort", "on", "warnings"),
    [("none", False, 0), ("minimal", False, 1), ("low", True, 1), ("medium", True, 1), ("high", True, 1)],
)
def test_a_switch_is_turned(effort: Effort, on: bool, warnings: int) -> None:
    seen, told = with_effort(chat(), effort, SWITCH)
    assert seen.template_kwargs == {"enable_thinking": on}
    assert len(told) == warnings
    assert all(f"{effort!r} turns it {'on' if on else 'off'}" in text for text in told)


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
