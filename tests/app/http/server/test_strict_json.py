from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.app.errors import ApiError
from llmbox.app.http.server.request import decode, load


class Message(msgspec.Struct):
    role: str
    content: str | None = None


class Body(msgspec.Struct):
    messages: list[Message]
    temperature: float | None = None
    n: int = 1
    bias: dict[str, float] = {}


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class Picture(msgspec.Struct, tag_field="type", tag="image_url"):
    detail: Literal["low", "high"] = "low"


class Chosen(msgspec.Struct):
    effort: Literal["low", "high"] | None = None
    choice: Literal["none", "auto"] | Text = "auto"
    parts: list[Text | Picture] = []
    by_name: dict[str, Literal["only"]] = {}


def refusal(body: bytes, kind: Any = Body) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(body, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"\xff": 1}', "UTF-8"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": 1}{"b": 2}', "Extra data"),
        (b'{"a": 1,}', "JSON"),
        (b"{'a': 1}", "JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "line\nbreak"}', "control character"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too long"),
        (b'{"messages"', "JSON"),
        (b"[" * 30, "JSON"),
    ],
)
def test_a_malformed_body_is_named(body: bytes, words: str) -> None:
    error = refusal(body)
    assert error.code == "invalid_json"
    assert words in error.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [], "messages": []}',
        b'{"messages": [{"role": "user", "role": "system"}]}',
        b'{"x": {"a": 1, "b": 2, "a": 3}}',
        b'{"a": 1, "\\u0061": 2}',
    ],
)
def test_a_key_may_appear_once(body: bytes) -> None:
    assert refusal(body).code == "duplicate_key"


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_ends_at_the_limit(opening: bytes, closing: bytes) -> None:
    def nested(depth: int) -> bytes:
        return opening * depth + b"1" + closing * depth

    load(nested(32))
    for depth in (33, 1000, 40_000):
        with pytest.raises(ApiError) as caught:
            load(nested(depth))
        assert caught.value.code == "json_too_deep"


def test_nesting_of_both_kinds_is_counted_exactly() -> None:
    def nested(depth: int) -> bytes:
        return b'[{"a":' * (depth // 2) + b"[]" * (depth % 2) + b"1" * (1 - depth % 2) + b"}]" * (depth // 2)

    load(nested(32))
    with pytest.raises(ApiError):
        load(nested(33))


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b",".join(b'"%d":1' % n for n in range(60_000)) + b"}",
        b"[" + b",".join([b'{"a":1}'] * 60_000) + b"]",
        b"[" + b"1," * 400_000 + b"1]",
    ],
)
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(body: bytes) -> None:
    assert refusal(body).code == "json_too_large"


def test_text_may_hold_any_number_of_marks() -> None:
    text = '{"a":1},[":,' * 100_000
    assert load(msgspec.json.encode({"text": text})) == {"text": text}


def test_brackets_inside_of_strings_do_not_count_as_nesting() -> None:
    assert load(b'{"a": "' + b"[{" * 1000 + b'\\"[["}') == {"a": "[{" * 1000 + '"[['}
    assert load(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"{}", "messages", "missing_required_parameter"),
        (b"[]", None, "invalid_type"),
        (b'{"messages": [{}]}', "messages[0].role", "missing_required_parameter"),
        (b'{"messages": [{"role": "a"}, {"role": 1}]}', "messages[1].role", "invalid_type"),
        (b'{"messages": [], "temperature": "0.5"}', "temperature", "invalid_type"),
        (b'{"messages": [], "temperature": "nan"}', "temperature", "invalid_type"),
        (b'{"messages": [], "temperature": 1e999}', "temperature", "invalid_value"),
        (b'{"messages": [], "n": true}', "n", "invalid_type"),
        (b'{"messages": [], "n": 1.5}', "n", "invalid_type"),
        (b'{"messages": [], "bias": {"1": "x"}}', "bias", "invalid_type"),
    ],
)
def test_a_wrong_type_names_its_place(body: bytes, param: str | None, code: str) -> None:
    error = refusal(body)
    assert (error.param, error.code) == (param, code)
    assert "`" not in error.message


def test_unknown_fields_are_left_in_the_plain_values() -> None:
    typed, plain = decode(b'{"messages": [], "shiny": {"new": [1]}}', Body)
    assert typed == Body([])
    assert plain["shiny"] == {"new": [1]}


def test_escaped_emoji_are_text() -> None:
    typed, _ = decode(b'{"messages": [{"role": "\\ud83d\\ude00"}]}', Body)
    assert typed.messages[0].role == "\N{GRINNING FACE}"


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_refusal(body: bytes) -> None:
    try:
        decode(body, Body)
    except ApiError as error:
        told = error
    else:
        return
    assert told.status == 400
    msgspec.json.encode(told.body())


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_what_json_can_say_is_read_back(value: Any) -> None:
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:
        return
    assert load(body) == value


@pytest.mark.parametrize(
    ("body", "permitted"),
    [
        (b'{"effort": "x"}', "it must be 'high' or 'low'"),
        (b'{"choice": "x"}', "it must be 'auto' or 'none'"),
        (b'{"choice": {"type": "x"}}', "it must be 'text'"),
        (b'{"parts": [{"type": "x"}]}', "it must be 'text' or 'image_url'"),
        (b'{"parts": [{"type": "image_url", "detail": "x"}]}', "it must be 'high' or 'low'"),
        (b'{"by_name": {"a": "x"}}', "it must be 'only'"),
    ],
)
def test_the_error_of_a_wrong_value_lists_the_permitted_ones(body: bytes, permitted: str):
    error = refusal(body, Chosen)
    assert error.code == "invalid_value"
    assert error.message.endswith(f"'x'; {permitted}."), error.message
