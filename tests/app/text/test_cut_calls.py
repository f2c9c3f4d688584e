"""Calls of answers that reached their token limit: the name, and the arguments so far."""

import json

import pytest

from llmbox.app.text.output import make_parser
from llmbox.app.text.output.output_parser import ParsedOutput, read_arguments
from support.deferred_module import DeferredModule
from support.output_examples import ARGUMENTS, EXAMPLES, FORMATS, SCHEMAS, answer_with_calls

jiter = DeferredModule("jiter")

THINKING = {name: "may" if each.is_harmony else "no" for name, each in FORMATS.items()}
LISTS = [
    name
    for name, each in FORMATS.items()
    if each.tools.several
    and each.tools.opener in EXAMPLES[name]
    and (each.tools.closer or each.tools.between == each.tools.opener)
]


def cut(name, text, *, is_forced=True, schemas=SCHEMAS) -> ParsedOutput:
    """Parse an answer that reached its token limit: whole, and character by character."""
    both = []
    for pieces in ([text], text):
        parser, parts = (
            make_parser(FORMATS[name], THINKING[name], schemas, is_forced=is_forced),
            ParsedOutput(),
        )
        for piece in pieces:
            parts.add(parser.push(piece))
        parts.add(parser.finish(is_cut=True))
        both.append(parts)
    assert both[0] == both[1]
    return both[0]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere_is_a_beginning_of_that_call(name):
    whole, seen = EXAMPLES[name], []
    for size in range(len(whole)):
        parts = cut(name, whole[:size])
        assert parts.content == ""
        if not parts.calls:
            assert not seen, "a name does not get lost again"
            continue
        (call,) = parts.calls
        assert call.name == "get_weather"
        found = read_arguments(call.arguments, keeps_cut_text=True)
        assert found.keys() <= ARGUMENTS.keys()
        assert ARGUMENTS["city"].startswith(found.get("city", ""))
        seen.append(found)
        if call.arguments and call.is_cut and found == {"city": "Köln"}:
            assert call.arguments.startswith('{"city"')
    assert len(seen) > 15
    assert seen[0] == {}
    assert ARGUMENTS in seen
    assert {"city": "Köln"} in seen


@pytest.mark.parametrize("between", ["]\n[", ", "])
@pytest.mark.parametrize("name", LISTS)
def test_calls_before_the_one_that_is_cut_are_whole(name, between):
    text = answer_with_calls(name, ["Rom", "Köln"]).replace("]\n[", between)
    found = cut(name, text[: text.rindex("ln")])
    assert found.content == ""
    assert [call.name for call in found.calls] == ["get_weather"] * 2
    assert [call.is_cut for call in found.calls] == [False, True]
    assert json.loads(found.calls[0].arguments) == {"city": "Rom", "days": 3}
    assert read_arguments(found.calls[1].arguments, keeps_cut_text=True).get("city", "Kö") == "Kö"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'Look. <tool_call>\n{"name": "get_wea', "Look.", []),
        ("hermes", 'Look. <tool_call>\n{"name": "get_weather", "arg', "Look.", [""]),
        ("hermes", 'Look. <tool_call>\n{"name": "get_weather", "arguments": {"ci', "Look.", ['{"ci']),
        ("hermes", "<tool_call> is a mark", "<tool_call> is a mark", []),
        ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
        ("llama3", '{"na', '{"na', []),  # may be any JSON
        ("llama3", '{"name": "Ann", "age', '{"name": "Ann", "age', []),
        ("llama3", '{"name": "get_weather", "parameters": {"city": "K', "", ['{"city": "K']),
        (
            "pythonic",
            '[get_weather(city="Rom"), get_weather(city="Rom", ',
            "",
            ['{"city": "Rom"}', '{"city": "Rom"'],
        ),
        ("lfm2", '<|tool_call_start|>[get_weather(city="Kö', "", [""]),
        ("lfm2", '<|tool_call_start|>[get_weather(city="Kö, 1", da', "", ['{"city": "Kö, 1"']),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Kö<|"', "", ['{"city":"K\\u00f6']),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Kö<|"|>,da', "", ['{"city":"K\\u00f6",']),
        ("glm47", "<tool_call>get_weath", "", []),
        ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Kö</ar", "", ['{"city": "Kö']),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n1", "", ['{"days": 1']),
    ],
)
def test_answers_that_are_cut_and_may_be_free(name, text, content, calls):
    found = cut(name, text, is_forced=False)
    assert (found.content, [call.arguments for call in found.calls]) == (content, calls)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_lost_of_an_answer_without_calls_that_is_cut(name):
    opener = FORMATS[name].tools.opener
    text = f"a {opener} b" if THINKING[name] == "no" else "no header"
    whole = make_parser(FORMATS[name], THINKING[name], SCHEMAS).parse_whole(text)
    assert cut(name, text, is_forced=False) == whole


JSON = '{"a": {"b": [1, "x"], "c": {}}, "d": "two, {\\n\\u00e9\\\\", "e": [-12.5, true, {"f": null}]}'


@pytest.mark.parametrize(("keeps", "mode"), [(False, True), (True, "trailing-strings")])
def test_arguments_of_a_cut_call_as_an_object(keeps, mode):
    """As the clients of OpenAI and Anthropic read them."""
    for size in range(len(JSON) + 1):
        text = JSON[:size]
        expected = jiter.from_json(text.encode(), partial_mode=mode) if text else {}
        assert read_arguments(text, keeps_cut_text=keeps) == expected, text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": "two\nlines", "b": "x', {"a": "two\nlines", "b": "x"}),
        ('{"a": 1, "b": "\\ud83d', {"a": 1}),  # half a surrogate pair could not be sent
        ("[1", {}),
        ("no JSON", {}),
        ("[" * 100_000, {}),
    ],
)
def test_arguments_that_no_client_reads(text, arguments):
    assert read_arguments(text, keeps_cut_text=True) == arguments
