"""Thoughts, text and calls come out the same wherever the answer was cut, in every output format."""

import itertools
import json
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from fuzz.output_streams import differing_stream
from llmbox.app.text.output import make_parser
from llmbox.app.text.output.call_parsers import ParsedToolCall, parse_calls
from llmbox.app.text.output.format_table import recognize_format
from llmbox.app.text.output.output_formats import (
    HARMONY_THOUGHTS,
    OutputFormat,
    ReasoningMarks,
    thinking_after,
)
from llmbox.app.text.output.output_parser import ParsedOutput
from llmbox.app.text.tokenizer.text_loader import end_token_ids
from support.lanes import NIGHTLY
from support.output_examples import ARGUMENTS, EXAMPLES, FORMATS, SCHEMAS, template_of

CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
WEATHER = ParsedToolCall("weather", '{"city": "Köln"}')
MARKS = ReasoningMarks("<think>", "</think>")
PLAIN = OutputFormat(name="plain", reasoning=MARKS)
HERMES, MISTRAL, LLAMA = FORMATS["hermes"], FORMATS["mistral_json"], FORMATS["llama3"]
STREAMS = int(os.environ.get("LLMBOX_TEST_STREAMS", "40000" if NIGHTLY else "400"))
"""Random answers in each format; new ones each night."""
SEED = os.urandom(4).hex() if NIGHTLY else ""


def parse(pieces, thinking="no", format_=PLAIN, schemas=None, **options) -> ParsedOutput:
    parser = make_parser(format_, thinking, {"weather": {}} if schemas is None else schemas, **options)
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
    ("text", "format_", "content", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", HERMES, "", 1),
        (f"Let me.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", HERMES, "Let me.", 2),
        (f"<tool_call>\n{CALL}", HERMES, "", 1),  # ended without its mark
        (f"<tool_call>{CALL[:-3]}", HERMES, f"<tool_call>{CALL[:-3]}", 0),  # cut off
        ("<tool_call>no</tool_call> more", HERMES, "<tool_call>no</tool_call> more", 0),
        (f'<tool_call>"</tool_call> <tool_call>{CALL}</tool_call>', HERMES, '<tool_call>"</tool_call>', 1),
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
def test_calls(text, format_, content, calls):
    assert parse([text], format_=format_) == ParsedOutput("", content, [WEATHER] * calls)
    assert parse(text, format_=format_) == ParsedOutput("", content, [WEATHER] * calls)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_known_by_its_template_and_read(name):
    assert recognize_format(template_of(name)).tools == FORMATS[name].tools
    format_ = FORMATS[name]
    bare = format_.tools.bare and not EXAMPLES[name].startswith(format_.tools.opener)
    before = "" if bare or format_.is_harmony else "I will look.\n"
    for pieces in ([before + EXAMPLES[name]], before + EXAMPLES[name]):
        read = parse(pieces, "may" if format_.is_harmony else "no", format_, SCHEMAS)
        assert (read.content, [call.name for call in read.calls]) == (before.strip(), ["get_weather"])
        assert json.loads(read.calls[0].arguments) == ARGUMENTS


@pytest.mark.property
@pytest.mark.parametrize("name", FORMATS)
def test_where_random_streams_are_cut_changes_nothing(name):
    assert differing_stream(name, random.Random(name + SEED), STREAMS) == "", SEED


def test_one_call_where_more_are_not_wanted():
    text = f"<tool_call>{CALL}</tool_call>" * 3
    assert parse([text], format_=HERMES, most_calls=1).calls == [WEATHER]


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "think", " ", "\n", "a", "{", "}"]


@given(
    words=st.lists(st.sampled_from(PIECES), max_size=10),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    thinking=st.sampled_from(["no", "may", "inside"]),
    tools=st.sampled_from([None, HERMES.tools, LLAMA.tools]),
)
def test_where_it_is_cut_changes_nothing(words, cuts, thinking, tools):
    text = "".join(words)
    format_ = OutputFormat(name="x", tools=tools, reasoning=MARKS)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(pieces, thinking, format_) == parse([text], thinking, format_)
    assert parse(text, thinking, format_) == parse([text], thinking, format_)


def test_arguments_as_text_and_with_line_breaks():
    written = '{"name": "f", "arguments": "{\\"a\\": 1}"}, {"name": "g", "arguments": {"b": "1\n2"}}'
    one, two = parse_calls(HERMES.tools, written)
    assert json.loads(one.arguments) == {"a": 1}
    assert json.loads(two.arguments) == {"b": "1\n2"}
    assert parse_calls(HERMES.tools, '{"name": "f", "arguments": [1]}') is None
    assert parse_calls(HERMES.tools, "[" * 100_000) is None


def test_marks_inside_values_are_text():
    told = '{"name": "weather", "arguments": {"city": "</tool_call>"}}'
    (call,) = parse(f"<tool_call>{told}</tool_call>", format_=HERMES).calls
    assert json.loads(call.arguments) == {"city": "</tool_call>"}
    told = "<tool_call><function=get_weather><parameter=city></tool_call></parameter></function></tool_call>"
    (call,) = parse(told, format_=FORMATS["qwen3_coder"], schemas=SCHEMAS).calls
    assert json.loads(call.arguments) == {"city": "</tool_call>"}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "integer"}, "\n7\n", 7),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "{}", "{}"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "007", "007"),
        ({}, '{"a": 1}', {"a": 1}),
    ],
)
def test_marked_parameters_have_the_type_of_the_schema(schema, written, value):
    schemas = {"f": {"properties": {"x": schema}}}
    told = f"<tool_call>\n<function=f>\n<parameter=x>{written}</parameter>\n</function>\n</tool_call>"
    (call,) = parse([told], format_=FORMATS["qwen3_coder"], schemas=schemas).calls
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("[f(a='x', b=[1, -2.5], c={'k': None})]", {"a": "x", "b": [1, -2.5], "c": {"k": None}}),
        ("[f(a=true, b=null)]", {"a": True, "b": None}),
        ("[f(a='two\nlines')]", {"a": "two\nlines"}),
        ("[f()]", {}),
        ("[f(1)]", None),
        ("[f(a=open('x'))]", None),
        ("[f(a=b''), 1]", None),
        ("import os", None),
        ("[" * 5000, None),
    ],
)
def test_python_calls_are_literals_only(written, arguments):
    calls = parse_calls(FORMATS["lfm2"].tools, written)
    assert (None if calls is None else json.loads(calls[0].arguments)) == arguments


def test_a_tool_whose_name_is_no_python_name_is_called():
    (call,) = parse_calls(FORMATS["lfm2"].tools, "[get-it(a=1)]", {"get-it": {}})
    assert call == ParsedToolCall("get-it", '{"a": 1}')


HARMONY = FORMATS["harmony"]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel|>final<|message|>Yes.", "", "Yes.", 0),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A",
            "Hm.",
            "A",
            0,
        ),
        (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{EXAMPLES['harmony']}", "Hm.", "", 1),
        (
            '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "K"}',
            "",
            "",
            1,
        ),
        (
            "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant" + EXAMPLES["harmony"],
            "",
            "Wait.",
            1,
        ),
        ("<|channel|>commentary to=functions.get_weather<|message|>oops", "", "oops", 0),
        ("no header at all", "", "no header at all", 0),
        ("<|channel|>fin", "", "", 0),
    ],
)
def test_harmony_messages(text, reasoning, content, calls):
    for pieces in ([text], text):
        read = parse(pieces, "may", HARMONY, SCHEMAS)
        assert (read.reasoning, read.content, len(read.calls)) == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hunyuan", "<answer>\nYes.\n</answer>", "Yes."),
        ("hunyuan", "Yes <answer> no</answer>", "Yes <answer> no</answer>"),
        ("granite", "<response>Yes.</response>", "Yes."),
    ],
)
def test_marks_around_the_answer_are_left_out(name, text, content):
    assert parse([text], format_=FORMATS[name]).content == content
    assert parse(text, format_=FORMATS[name]).content == content


def test_thoughts_that_a_call_ends():
    format_ = OutputFormat(name="kimi_k2", tools=FORMATS["kimi_k2"].tools, reasoning=MARKS)
    read = parse(f"Hm. {EXAMPLES['kimi_k2']}", "inside", format_, SCHEMAS)
    assert (read.reasoning, read.content, len(read.calls)) == ("Hm.", "", 1)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral_json"),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}ipython', "llama3"),
        ("{% if tools %}<tool_call>\n<arg_key>k</arg_key><arg_value>v</arg_value>{% endif %}", "glm47"),
        ("{{ messages }}", "plain"),
        (None, "plain"),
    ],
)
def test_the_format_is_the_template_s(template, name):
    assert recognize_format(template).name == name


@pytest.mark.parametrize("closer", ["</think>", "[/THINK]", "</seed:think>"])
def test_marks_of_thoughts_are_the_template_s(closer):
    marks = recognize_format(f"{{{{ messages }}}} {closer}").reasoning
    assert marks is not None
    assert marks.closer == closer
    assert recognize_format("<|channel|><|message|>").reasoning == HARMONY_THOUGHTS


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
        ("<|channel><channel|>", "<|turn>model\n<|channel>thought\n<channel|>", None, "no"),
        ("<|channel><channel|>", "<|turn>model\n", None, "may"),
        ("<|channel|><|message|>", "<|end|><|start|>assistant", None, "may"),
    ],
)
def test_how_an_answer_begins(template, prompt, continued, begins):
    assert thinking_after(recognize_format(template), prompt, continued) == begins


def test_harmony_s_end_of_a_message_does_not_end_the_answer():
    tokenizer = Tokenizer(models.WordLevel({"<|end|>": 0, "<|call|>": 1, "<|return|>": 2}, "<|end|>"))
    harmony = "<|channel|><|message|><|end|><|call|><|return|>"
    assert set(end_token_ids(tokenizer, {}, harmony, [])) == {1, 2}
    assert end_token_ids(tokenizer, {}, "<|end|>", []) == (0,)
