"""Thoughts, text and calls come out the same wherever the answer was cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.app.text.output_parser import (
    HERMES,
    LLAMA,
    MISTRAL,
    OutputParser,
    ParsedOutput,
    ParsedToolCall,
    parse_calls,
    thinking_after,
    tool_syntax,
)

CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
WEATHER = ParsedToolCall("weather", '{"city": "Köln"}')


def parse(pieces, thinking="no", tools=None, **options) -> ParsedOutput:
    parser = OutputParser(thinking, tools, frozenset({"weather"}), **options)
    whole = ParsedOutput()
    for part in [*map(parser.push, pieces), parser.finish()]:
        whole.add(part)
    return whole


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes. ", "may", "hm\n\nso", "Yes. "),
        ("\nso\n</think>\nYes.", "inside", "so", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "may", "", "Yes."),
        (" Yes, <think> is a tag.</think>", "may", "", " Yes, <think> is a tag.</think>"),
        ("<thin air>", "may", "", "<thin air>"),
        ("<thi", "may", "", "<thi"),
        ("<think>cut </thi", "may", "cut </thi", ""),
        ("<think>a</think>b", "no", "", "<think>a</think>b"),
        (" \n", "may", "", " \n"),
    ],
)
def test_thoughts(text, thinking, reasoning, content):
    assert parse([text], thinking) == ParsedOutput(reasoning, content)
    assert parse(text, thinking) == ParsedOutput(reasoning, content)


@pytest.mark.parametrize(
    ("text", "syntax", "content", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", HERMES, "", 1),
        (
            f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
            HERMES,
            "Let me see.",
            2,
        ),
        (f"<tool_call>\n{CALL}", HERMES, "", 1),  # ended without its mark
        (f"<tool_call>{CALL[:-3]}", HERMES, f"<tool_call>{CALL[:-3]}", 0),  # cut off
        ("<tool_call>no</tool_call> more", HERMES, "<tool_call>no</tool_call> more", 0),
        ("1 < 2 <tool", HERMES, "1 < 2 <tool", 0),
        (f"[TOOL_CALLS] [{CALL}, {CALL}]", MISTRAL, "", 2),
        (f"[TOOL_CALLS]{CALL} what", MISTRAL, f"[TOOL_CALLS]{CALL} what", 0),
        (CALL.replace("arguments", "parameters"), LLAMA, "", 1),
        (f"<|python_tag|>{CALL}; {CALL}", LLAMA, "", 1),  # its template takes back no more
        ('{"name": "other", "parameters": {}}', LLAMA, '{"name": "other", "parameters": {}}', 0),
        ('{"answer": 1}', LLAMA, '{"answer": 1}', 0),
        (f"It is {CALL}", LLAMA, f"It is {CALL}", 0),
    ],
)
def test_calls(text, syntax, content, calls):
    assert parse([text], tools=syntax) == ParsedOutput("", content, [WEATHER] * calls)
    assert parse(text, tools=syntax) == ParsedOutput("", content, [WEATHER] * calls)


def test_one_call_where_more_are_not_wanted():
    text = f"<tool_call>{CALL}</tool_call>" * 3
    assert parse([text], tools=HERMES, most_calls=1).calls == [WEATHER]


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "think", " ", "\n", "a", "{", "}"]


@given(
    words=st.lists(st.sampled_from(PIECES), max_size=10),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    thinking=st.sampled_from(["no", "may", "inside"]),
    tools=st.sampled_from([None, HERMES, LLAMA]),
)
def test_where_it_is_cut_changes_nothing(words, cuts, thinking, tools):
    text = "".join(words)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(pieces, thinking, tools) == parse([text], thinking, tools) == parse(text, thinking, tools)


def test_arguments_as_text_and_with_line_breaks():
    written = '{"name": "f", "arguments": "{\\"a\\": 1}"}, {"name": "g", "arguments": {"b": "1\n2"}}'
    one, two = parse_calls(written)
    assert json.loads(one.arguments) == {"a": 1}
    assert json.loads(two.arguments) == {"b": "1\n2"}
    assert parse_calls('{"name": "f", "arguments": [1]}') is None
    assert parse_calls("[" * 100_000) is None


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}ipython', LLAMA),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_syntax_is_the_template_s(template, syntax):
    assert tool_syntax(template) == syntax


@pytest.mark.parametrize(
    ("template", "prompt", "continued", "begins"),
    [
        ("no thoughts", "assistant\n<think>\n", None, "no"),
        ("</think>", "assistant\n", None, "may"),
        ("</think>", "assistant\n<think>\n", None, "inside"),
        ("</think>", "assistant\n<think>\n\n</think>\n\n", None, "no"),
        ("</think>", "assistant\n<think>\nI", "<think>\nI", "inside"),
        ("</think>", "assistant\nYes", "<think>a</think>Yes", "no"),
        ("</think>", "assistant\nYes", "Yes", "no"),
    ],
)
def test_how_an_answer_begins(template, prompt, continued, begins):
    assert thinking_after(template, prompt, continued) == begins
