"""Grammars of answers that may be words or calls, in each output format."""

import itertools
import json
from types import SimpleNamespace

import pytest
from llguidance import LLMatcher, LLTokenizer

from llmbox.app.text.grammar.grammars import bare_calls, calls, free_text, grammars, json_input
from llmbox.app.text.grammar.json_lark import lark_in_json
from llmbox.app.text.output import make_parser
from llmbox.app.text.output.output_formats import ToolSyntax
from support.output_examples import ARGUMENTS, EXAMPLES, FORMATS, SCHEMAS

HERMES, MISTRAL, LLAMA = (FORMATS[name].tools for name in ("hermes", "mistral_json", "llama3"))
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
INPUTS = {"run": json_input("input0", lark_in_json("[ab]+\\n", "regex"), "input")}
TEXT = SimpleNamespace(
    tokenizer=SimpleNamespace(token_to_id=lambda mark: None), tokens=SimpleNamespace(special_ids=())
)


def accepts(made, answer: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), json.dumps({"grammars": made}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(answer.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def takes(syntax: ToolSyntax, answer: str) -> bool:
    made = calls(TEXT, syntax, [TOOL], INPUTS, several=syntax.most != 1)
    return accepts(grammars(free_text(TEXT, syntax), made), answer)


def called(field: str, text: str) -> str:
    return f'{{"name": "run", "{field}": {{"input": {json.dumps(text)}}}}}'


@pytest.mark.parametrize(
    ("syntax", "field", "around"),
    [
        (HERMES, "arguments", "<tool_call>\n{}\n</tool_call>"),
        (MISTRAL, "arguments", "[TOOL_CALLS][{}]"),
        (LLAMA, "parameters", "{}"),
    ],
)
def test_words_or_calls_whose_input_follows(syntax: ToolSyntax, field: str, around: str):
    good, bad = (around.format(called(field, text)) for text in ("ab\n", "abc\n"))
    assert takes(syntax, "Some words, é\n and < others, <<tool <t<to_call, [TOOL [[")
    assert takes(syntax, good)
    assert not takes(syntax, bad)
    if not syntax.bare:
        assert takes(syntax, f"I will < run it.\n{good}")
        assert takes(syntax, f"I will run it: {syntax.opener[:3]}")
        assert not takes(syntax, f"I will run it.\n{bad}")


def test_several_calls_where_a_model_writes_several():
    one = "<tool_call>\n{}\n</tool_call>".format(called("arguments", "a\n"))
    assert takes(HERMES, f"{one}\n{one}")


WEATHER = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_are_written_as_the_family_writes_them(name, several):
    syntax = FORMATS[name].tools
    made = grammars(None, calls(TEXT, syntax, WEATHER, {}, several=several))
    answer = EXAMPLES[name]
    if syntax.bare and answer.startswith(syntax.opener):  # forced, it stands alone
        answer = answer.removeprefix(syntax.opener).removesuffix(syntax.closer)
    assert accepts(made, answer), answer
    assert not accepts(made, answer.replace("3", '"three"'))
    assert not accepts(made, answer.replace("days", "days_of"))
    assert not accepts(made, answer.replace("city", "town"))
    assert not accepts(made, answer.replace("get_weather", "get_whether"))
    assert not accepts(made, "It rains.")


RICH = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": "string", "maxLength": 4},
        "deep": {"type": "boolean"},
        "any": {},
    },
    "required": ["place"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
MEANT = [
    {"place": {"x": 1.5}},
    {"unit": "F", "tags": ["a", "b"], "place": {"x": -2}, "note": "abcd", "deep": True},
    {"place": {"x": 0}, "any": {"k": [None, "v"]}},
]


def write(name: str, values: dict) -> str:
    """A call with these arguments in formats that mark parameters one by one."""
    syntax = FORMATS[name].tools
    if syntax.style == "xml":
        before, middle, after = syntax.parameter
        told = "".join(
            before + key + middle.replace("{string}", "true" if isinstance(value, str) else "false")
            + (value if isinstance(value, str) else json.dumps(value)) + after + syntax.after_parameter
            for key, value in values.items()
        )  # fmt: skip
        call = f"{syntax.before_name}get_it{syntax.after_name}{told}{syntax.after_call}"
        return f"{syntax.opener}{syntax.padding}{call}{syntax.padding}{syntax.closer}"
    return f"{syntax.opener}call:get_it{gemma(values, syntax.quote)}{syntax.closer}"


def gemma(value, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{gemma(each, quote)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(gemma(each, quote) for each in value) + "]"
    return json.dumps(value)


MARKED = [name for name, each in FORMATS.items() if each.tools.style in ("xml", "gemma")]


@pytest.mark.parametrize("name", MARKED)
def test_marked_parameters_follow_the_schema_and_are_read_back(name):
    tools = [{"type": "function", "function": {"name": "get_it", "parameters": RICH}}]
    made = grammars(None, calls(TEXT, FORMATS[name].tools, tools, {}, several=False))
    for values in MEANT:
        answer = write(name, values)
        assert accepts(made, answer), answer
        parser = make_parser(FORMATS[name], "no", {"get_it": RICH})
        (call,) = parser.push(answer).calls
        assert json.loads(call.arguments) == values
    for bad in ({"unit": "K", "place": {"x": 1}}, {"unit": "C"}, {"place": {"x": 1}, "deep": 1}):
        assert not accepts(made, write(name, bad)), bad


def test_harmony_answers_and_calls_come_after_the_thoughts():
    harmony = SimpleNamespace(**vars(TEXT))
    answer = {"lark_grammar": "start: /[a-z]+/"}
    made = calls(TEXT, FORMATS["harmony"].tools, WEATHER, {}, several=False)
    either = grammars(answer, made, harmony)
    thought = "<|channel|>analysis<|message|>Hm, < well.<|end|><|start|>assistant"
    for before in ("", thought, thought * 2):
        assert accepts(either, f"{before}<|channel|>final<|message|>yes")
        assert accepts(either, before + EXAMPLES["harmony"])
        assert not accepts(either, f"{before}<|channel|>final<|message|>YES")
    assert not accepts(grammars(None, made, harmony), "<|channel|>final<|message|>yes")
    assert ARGUMENTS


@pytest.mark.parametrize("name", ["llama3", "llama4", "pythonic"])
def test_calls_without_a_mark_follow_the_schema_and_other_text_is_free(name):
    syntax = FORMATS[name].tools
    made = [bare_calls(syntax, WEATHER), *calls(TEXT, syntax, WEATHER, {}, several=False)]
    call = EXAMPLES["llama3"] if name.startswith("llama") else EXAMPLES[name]
    assert accepts(made, call)
    assert not accepts(made, call.replace("3", '"three"'))
    for said in (
        "It rains.",
        "",
        '{"name": "get_whether", "parameters": {}}',
        '{"city": "Köln"}',
        "[1, 2]",
        "{",
    ):
        assert accepts(made, said), said


@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].tools.bare])
def test_after_the_opening_mark_the_schema_is_followed(name):
    syntax = FORMATS[name].tools
    made = grammars(None, calls(TEXT, syntax, WEATHER, {}, several=True, opened=True))
    rest = EXAMPLES[name].removeprefix(syntax.opener)
    assert rest != EXAMPLES[name]
    assert accepts(made, rest)
    assert not accepts(made, rest.replace("3", '"three"'))


CHOICES = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["", "C"]},
        "empty": {"enum": [""]},
        "place": {"type": ["string", "null"], "enum": ["home", None]},
    },
    "required": ["unit", "empty", "place"],
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "gemma4", "functiongemma"])
def test_every_value_of_an_enum_can_be_said(name):
    tools = [{"type": "function", "function": {"name": "get_it", "parameters": CHOICES}}]
    made = grammars(None, calls(TEXT, FORMATS[name].tools, tools, {}, several=False))
    for unit, place in itertools.product(["", "C"], ["home", None]):
        values = {"unit": unit, "empty": "", "place": place}
        answer = write(name, values)
        assert accepts(made, answer), answer
        (call,) = make_parser(FORMATS[name], "no", {"get_it": CHOICES}).push(answer).calls
        assert json.loads(call.arguments) == values
    for bad in ({"unit": "F"}, {"empty": "C"}, {"place": "away"}, {"place": 1}):
        assert not accepts(made, write(name, {"unit": "", "empty": "", "place": None} | bad)), bad


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_values_of_several_types_in_an_enum(name):
    schema = {"type": "object", "properties": {"size": {"enum": [1, "auto", True]}}, "required": ["size"]}
    tools = [{"type": "function", "function": {"name": "get_it", "parameters": schema}}]
    made = grammars(None, calls(TEXT, FORMATS[name].tools, tools, {}, several=False))
    for value in (1, "auto", True):
        assert accepts(made, write(name, {"size": value})), value
    for value in ("1", "one", 2, False):
        assert not accepts(made, write(name, {"size": value})), value
