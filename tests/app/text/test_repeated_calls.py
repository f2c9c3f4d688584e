"""Answers that write the same calls again and again end; others do not."""

import random

import pytest

from llmbox.app.text.output import make_parser
from llmbox.app.text.stop_strings import LOOP_TOKENS, CallMark, RepeatedCalls
from support.output_examples import EXAMPLES, FORMATS, SCHEMAS, answer_with_calls

MARKS = {name: each.tools.call_mark for name, each in FORMATS.items() if each.tools and each.tools.call_mark}
WIDTH = 4
"""Characters of a token."""


def tokens_of(text: str) -> list[str]:
    return [text[at : at + WIDTH] for at in range(0, len(text), WIDTH)]


def read(mark: CallMark, pieces: list[str]) -> tuple[str, int | None]:
    """The text that is let through, and the number of tokens at which a loop was found."""
    subject, text = RepeatedCalls(mark), ""
    for count, piece in enumerate(pieces, 1):
        text += subject.push(piece)
        if subject.matched:
            return text, count
    return text + subject.finish(), None


def calls_of(name: str, text: str) -> int:
    parser = make_parser(FORMATS[name], "no", SCHEMAS)
    parts = parser.push(text)
    parts.add(parser.finish())
    assert "<" not in parts.content
    assert "[" not in parts.content
    return len(parts.calls)


@pytest.mark.parametrize("name", MARKS)
def test_the_same_call_again_and_again_ends_the_answer(name: str) -> None:
    text = answer_with_calls(name, ["Köln"] * 200)
    found, count = read(MARKS[name], tokens_of(text))
    assert count is not None
    assert count <= LOOP_TOKENS + 2 * len(EXAMPLES[name]) // WIDTH + 2
    assert text.startswith(found)
    tools = FORMATS[name].tools
    assert (tools.most or 4) <= calls_of(name, found) < 100, "whole calls, and nothing behind them"


@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi_k2", "deepseek_v31"])
def test_a_cycle_of_calls_ends_too(name: str) -> None:
    text = answer_with_calls(name, ["Köln", "Rom", "Bonn"] * 60)
    found, count = read(MARKS[name], tokens_of(text))
    assert count is not None
    assert 12 <= calls_of(name, found) < 60


def test_formats_whose_calls_cannot_be_cut_apart() -> None:
    lists = {"mistral_json", "phi4_mini", "granite", "nemotron", "cohere", "hunyuan", "lfm2", "olmo3"}
    assert FORMATS.keys() - MARKS.keys() == lists | {"harmony", "pythonic", "llama3"}


def test_no_false_alarm_in_10_000_texts() -> None:
    """Calls that differ, few equal ones, and text that is repeated inside one argument."""
    source = random.Random(5)
    mark = MARKS["hermes"]
    for number in range(10_000):
        cities = [f"{source.choice('abcdef')}{source.randrange(4)}" for _ in range(source.randrange(1, 12))]
        if number % 3 == 0:
            cities = ["Köln"] * 3 + cities[:3]
        if number % 3 == 1:
            cities = ["la " * source.randrange(200), "Rom"]
        text = answer_with_calls("hermes", cities)
        pieces = [text[at : at + 16] for at in range(0, len(text), 16)]
        found, count = read(mark, pieces)
        assert count is None, cities
        assert found == text


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_nothing_is_lost(name: str) -> None:
    """Marks in any pieces, also half of one at the end."""
    source, mark = random.Random(3), MARKS[name]
    for _ in range(300):
        text = answer_with_calls(name, source.choices(["Köln", "Rom"], k=3)) + mark.text[:3]
        pieces, at = [], 0
        while at < len(text):
            size = source.randrange(1, 9)
            pieces.append(text[at : at + size])
            at += size
        assert read(mark, pieces) == (text, None)
