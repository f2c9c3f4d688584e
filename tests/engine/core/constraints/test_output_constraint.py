"""Thoughts: where they begin and end, how many there are, and whether they repeat themselves for ever."""

import random

import pytest

from llmbox.engine.core.constraints.output_constraint import (
    LOOP_STRIDE,
    LOOP_TOKENS,
    GrammarCompiler,
    ThoughtTracker,
    is_loop,
)
from llmbox.engine.sampling_params import SamplingParams, ThinkingParams
from support.grammars import EOS, REGEX, TEXTS, THINK, THOUGHT, VOCABULARY
from support.lanes import examples

OPEN, CLOSE, WORD = 1, 2, 9
IDS = {"opener_ids": (OPEN,), "closer_ids": (CLOSE,), "end_ids": (CLOSE,)}


def tracker(texts=None, **params) -> ThoughtTracker:
    return ThoughtTracker(ThinkingParams(**{**IDS, **params}), texts)


def follow(thoughts: ThoughtTracker, ids) -> ThoughtTracker:
    for token in ids:
        thoughts.take(token)
    return thoughts


@pytest.mark.parametrize(
    ("begins", "ids", "place", "count"),
    [
        ("inside", [WORD, WORD], "thoughts", 2),
        ("inside", [WORD, CLOSE], "gap", 1),
        ("inside", [WORD, CLOSE, WORD], "answer", 1),
        ("may", [OPEN, WORD], "thoughts", 1),
        ("may", [WORD], "start", 0),
        ("may", [WORD] * 5 + [OPEN], "answer", 0),
        ("no", [OPEN, WORD], "answer", 0),
    ],
)
def test_places(begins, ids, place, count):
    thoughts = follow(tracker(begins=begins), ids)
    assert (thoughts.place, thoughts.count) == (place, count)


def test_thoughts_may_come_again_where_their_marks_are_special():
    thoughts = follow(
        tracker(begins="no", anywhere=True, budget=3), [WORD, OPEN, WORD, CLOSE, WORD, OPEN, WORD]
    )
    assert (thoughts.place, thoughts.count, thoughts.forced_ids) == ("thoughts", 2, [])
    thoughts.take(WORD)
    assert thoughts.forced_ids[0] == CLOSE


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_is_forced_at_the_budget(budget):
    thoughts = follow(tracker(begins="inside", budget=budget, end_ids=(CLOSE, 3, 4)), [WORD] * budget)
    for forced in (CLOSE, 3, 4):
        assert thoughts.forced_ids[0] == forced
        thoughts.take(forced)
    assert not thoughts.forced_ids


def test_marks_are_found_in_texts_that_no_token_stands_for():
    texts = [b"", b"<th", b"ink>", b"a", b"</thi", b"nk>\n", b"\n"]
    params = ThinkingParams(begins="may", end_ids=(4, 5), budget=2)
    thoughts = follow(ThoughtTracker(params, texts), [6, 1, 2, 3])
    assert (thoughts.place, thoughts.count, thoughts.forced_ids) == ("thoughts", 1, [])
    assert follow(thoughts, [4, 5]).place == "gap"


@pytest.mark.parametrize("count", [5, 250])
def test_what_may_be_forced_is_known_in_time(count):
    """A step ahead of its tokens is allowed only where none of them can be the last thought."""
    thoughts = tracker(begins="inside", budget=40, stop_loops=True)
    for _ in range(count):
        if thoughts.forced_ids:
            break
        ahead = tracker(begins="inside", budget=40, stop_loops=True)
        follow(ahead, [WORD] * (thoughts.count + 1))
        assert thoughts.may_force(1) or not ahead.forced_ids
        thoughts.take(WORD)
    assert not tracker(begins="inside").may_force(2)


LINES = [[WORD], [1, 2], list(range(20)), list(range(56))]


@pytest.mark.parametrize("line", LINES, ids=len)
@pytest.mark.parametrize("before", [0, 5, 300])
def test_a_line_again_and_again_ends_the_thought_within_256_tokens(line, before):
    thoughts = tracker(begins="inside", stop_loops=True, end_ids=(CLOSE,), opener_ids=(), closer_ids=(500,))
    source = random.Random(before)
    follow(thoughts, (source.randrange(100, 400) for _ in range(before)))
    for number in range(256):
        if thoughts.forced_ids:
            assert number >= LOOP_TOKENS
            return
        thoughts.take(line[number % len(line)])
    pytest.fail("the loop goes on")


def test_long_lines_are_found_at_their_fourth_time():
    line = list(range(200))
    assert is_loop([7] * 5 + line * 4)
    assert not is_loop(line * 3)


def test_loops_may_be_wanted():
    thoughts = follow(tracker(begins="inside", stop_loops=False), [WORD] * 2000)
    assert not thoughts.forced_ids


def texts(source: random.Random):
    """Texts that repeat much, as people and models write them: token ids of words, lists, tables and code."""
    words = [source.randrange(1000) for _ in range(source.choice([8, 40, 300]))]
    kind = source.randrange(6)
    for row in range(source.randrange(20, 40)):
        match kind:
            case 0:  # prose
                yield from source.choices(words, k=source.randrange(5, 20))
            case 1:  # a list whose items differ in a number
                yield from [5000, 2000 + row, 5001, *words[:6], 5002]
            case 2:  # a table of numbers
                yield from [each for _ in range(8) for each in (source.randrange(10), 6000)]
            case 3:  # code with the same lines, each at its own place
                yield from source.choice([words[:4], words[4:8], [7000 + row % 7]])
            case 4:  # a rule of dashes, then text
                yield from [8000] * source.randrange(40)
                yield from source.choices(words, k=6)
            case _:  # the same sentence three times, then another
                yield from words[: 5 + row % 4] * 3
                yield from source.choices(words, k=4)


@pytest.mark.property
def test_thousands_of_texts_are_no_loops():
    source = random.Random(1)
    for number in range(examples(10_000)):
        ids = list(texts(source))
        ends = range(LOOP_TOKENS, len(ids) + 1, LOOP_STRIDE)
        assert not any(is_loop(ids[max(0, end - 1024) : end]) for end in ends), number


def ids_of(text: bytes) -> list[int]:
    return [TEXTS.index(bytes([byte])) for byte in text]


@pytest.mark.parametrize(
    ("drafts", "count"),
    [
        (ids_of(b"abc-12x"), 7),
        ([*ids_of(b"ab-1x"), EOS, 5], 5),
        (ids_of(b"ab+12"), 2),
        ([THINK, THOUGHT, *ids_of(b"ab-")], 5),
        ([THINK, *ids_of(b"ab")], 2),
        ([], 0),
    ],
)
def test_masks_after_drafts_are_those_that_their_steps_would_have(drafts, count):
    """Up to the first that must not come or ends the answer; the request itself stays where it is."""
    compiler = GrammarCompiler(len(TEXTS))
    compiler.set_vocabulary(VOCABULARY)
    closer = {"opener_ids": (THINK,), "closer_ids": (THOUGHT,), "end_ids": (THOUGHT,)}
    thinking = ThinkingParams(begins="may", opener="<think>", closer="</think>", budget=1, **closer)
    params = SamplingParams(max_tokens=30, grammar=REGEX, thinking=thinking, stop_token_ids=(EOS,))
    ahead, alone = (compiler.constraint(params, 1) for _ in range(2))
    masks = ahead.allowed_after([7], ahead.allowed([7]), drafts)
    assert masks == [alone.allowed([7, *drafts[: place + 1]]) for place in range(count)]
    assert ahead.allowed([7, *ids_of(b"a")]) == compiler.constraint(params, 1).allowed([7, *ids_of(b"a")])
