import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmbox.app.text.stop_strings import StopStrings
from support.lanes import examples


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop string that is complete, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@st.composite
def texts_and_stops(draw):
    """Most stop strings stand in the text but for their last character: prefixes often begin again."""
    text = draw(st.text("ab", min_size=1, max_size=30) | st.text("abc", min_size=1, max_size=30))
    spans = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6))
    inside = spans.map(lambda span: text[span[0] : span[0] + span[1]])
    almost = st.builds(str.__add__, inside, st.sampled_from("abc"))
    return text, draw(st.lists(inside | almost | almost, min_size=1, max_size=3))


@settings(max_examples=examples(400))
@given(texts_and_stops(), st.lists(st.integers(0, 30), max_size=8))
@example(("acb", ["ab"]), [])
@example(("aaab", ["aab"]), [2])
@example(("ababac", ["abac"]), [3])
@example(("aabaabaac", ["aabaac", "baac"]), [1, 5])
def test_any_split_gives_what_the_whole_text_gives(text_and_stops, cuts):
    text, stops = text_and_stops
    matcher = StopStrings(stops)
    out = ""
    for piece in split(text, cuts):
        out += matcher.push(piece)
        assert not any(stop in out for stop in stops)
        if matcher.matched:
            break
    out += "" if matcher.matched else matcher.finish()
    assert (out, matcher.matched) == by_definition(text, stops)


def test_only_what_may_become_a_stop_string_is_held():
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("Hello\n") == "Hello"
    assert matcher.push("world") == "\nworld"
    assert matcher.push("\n\nUs") == ""
    assert matcher.push("er: hi") == ""
    assert matcher.matched == "\n\nUser:"


def test_a_text_that_ends_first_gives_back_what_was_held():
    matcher = StopStrings(["END"])
    assert matcher.push("the EN") == "the "
    assert matcher.finish() == "EN"
