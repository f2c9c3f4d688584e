"""Answers of a model of random weights, which follow what was asked all the same, as clients of all dialects
see them.
"""

import dataclasses
import json
import os
import re
import signal
import threading
from enum import Enum
from typing import Annotated, Literal

import httpx
import jsonschema_rs
import pydantic
import pytest
from tokenizers import Tokenizer

from llmbox.engine.ipc.spawn import Launch
from support.cli_box import until
from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.tiny_models import VOCAB, make_tiny_model, write_json, write_tokenizer

openai = DeferredModule("openai")

TEMPLATE = (
    "{%- for tool in tools or [] %}{{- tool.function.name + '\\n' }}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{#- calls: <tool_call> -#}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
ASKED = [{"role": "user", "content": "hello"}]
SEEDS = range(6)


class Color(Enum):
    RED = "red"
    BLUE = "dark blue"


class Item(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Annotated[str, pydantic.Field(max_length=4)]
    color: Color
    price: Annotated[int, pydantic.Field(ge=0, le=99)]


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["order"]
    items: Annotated[list[Item], pydantic.Field(max_length=2)]
    paid: bool | None


SCHEMA = Order.model_json_schema()
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "Rom"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {**CITY, "properties": {}, "required": []}},
    },
]


def make_thinker(root):
    """A tiny model with tokens for the marks of thoughts and calls."""
    directory = make_tiny_model(root / "model", max_position_embeddings=4096, vocab_size=VOCAB + 3)
    write_tokenizer(directory, VOCAB)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    told = directory / "tokenizer_config.json"
    begun = "{%- if enable_thinking %}{{- '<think>\\n' }}{%- else %}{{- '<think></think>' }}{%- endif %}"
    write_json(told, {**json.loads(told.read_text()), "chat_template": TEMPLATE + begun})
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=4096)
    told = directory / "tokenizer_config.json"
    write_json(told, {**json.loads(told.read_text()), "chat_template": TEMPLATE})
    with serving(tmp_path_factory.mktemp("data"), Launch(), grammar_bytes=8192) as server:
        server.load(directory, "tiny", device="cpu", threads=1, memory_bytes=256 << 20)
        thinker = make_thinker(tmp_path_factory.mktemp("thinker"))
        server.load(thinker, "thinker", device="cpu", threads=1, memory_bytes=256 << 20)
        yield server


def ask(client, seed=0, **fields):
    extra = fields.pop("extra_body", {})
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, seed=seed, temperature=1.2, extra_body=extra, **fields
    )
    cut = answer.choices[0].finish_reason == "length"
    told = [each.startswith("The answer was cut") for each in getattr(answer, "warnings", [])]
    assert told in ([True] * cut, [])
    return answer.choices[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_parse_gives_objects_of_the_callers_class(client, seed):
    answer = client.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Order, seed=seed, temperature=1.2
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Order)


def test_streams_and_answers_are_the_same(client):
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
    whole = ask(client, 4, response_format=form)
    chunks = client.chat.completions.create(
        model="tiny", messages=ASKED, seed=4, temperature=1.2, response_format=form, stream=True
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.message.content
    Order.model_validate_json(text)


FORMATS = [
    {"response_format": {"type": "json_object"}},
    {"extra_body": {"structured_outputs": {"json_object": True}}},
    {"extra_body": {"guided_json_object": True}},
]


@pytest.mark.parametrize("fields", FORMATS)
def test_any_object(client, fields):
    """A random model writes on and on in strings of its own choice: the end is what seldom comes."""
    ended = [choice for seed in range(8) if (choice := ask(client, seed, max_tokens=900, **fields))]
    whole = [choice for choice in ended if choice.finish_reason == "stop"]
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in whole)
    assert all(choice.message.content.startswith("{") for choice in ended)
    assert whole


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_schemas(client, fields):
    validator = jsonschema_rs.validator_for(SCHEMA)
    for seed in SEEDS:
        validator.validate(json.loads(ask(client, seed, extra_body=fields).message.content))


PATTERN = r"[A-F0-9]{4}/(yes|no)\d?"


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"regex": PATTERN}}, {"guided_regex": f"^{PATTERN}$"}]
)
def test_regexes(client, fields):
    texts = {ask(client, seed, extra_body=fields).message.content for seed in SEEDS}
    assert len(texts) > 1
    assert [text for text in texts if not re.fullmatch(PATTERN, text)] == []


@pytest.mark.parametrize("name", ["structured_outputs", "guided_choice"])
def test_choices(client, name):
    wanted = ["red", 'dark "blue"', "grün\n", "r"]
    fields = {name: {"choice": wanted} if name == "structured_outputs" else wanted}
    texts = {ask(client, seed, extra_body=fields).message.content for seed in range(12)}
    assert len(texts) > 1
    assert texts <= set(wanted)


GRAMMARS = [
    'root ::= "a" [0-9] pair\npair ::= "x" | "yy" pair',
    'start: "a" /[0-9]/ pair\npair: "x" | "yy" pair',
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["gbnf", "lark"])
@pytest.mark.parametrize("old", [True, False])
def test_grammars(client, grammar, old):
    fields = {"guided_grammar": grammar} if old else {"structured_outputs": {"grammar": grammar}}
    for seed in SEEDS:
        assert re.fullmatch(r"a[0-9](yy)*x", ask(client, seed, extra_body=fields).message.content)


def test_raw_completions_follow_too(client):
    answer = client.completions.create(
        model="tiny", prompt=["x", "yes"], n=2, temperature=1, extra_body={"guided_choice": ["alpha", "beta"]}
    )
    assert len(answer.choices) == 4
    assert {choice.text for choice in answer.choices} <= {"alpha", "beta"}


def test_log_probabilities_are_those_of_the_model(client):
    entries = ask(
        client, logprobs=True, top_logprobs=3, extra_body={"guided_choice": ["zebra"]}
    ).logprobs.content
    assert "".join(entry.token for entry in entries) == "zebra"
    assert all(entry.logprob < 0 for entry in entries)
    assert any(all(top.token != entry.token for top in entry.top_logprobs) for entry in entries)


def test_max_tokens_cuts(client):
    choice = ask(client, max_tokens=3, extra_body={"guided_regex": "a{40}"})
    assert choice.finish_reason == "length"
    assert set(choice.message.content) == {"a"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forced_call_has_arguments_by_its_schema(client, seed):
    choice = ask(client, seed, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    jsonschema_rs.validator_for(CITY).validate(json.loads(call.function.arguments))


OPEN = {"type": "object", "properties": {"ok": {"type": "boolean"}}}


def test_objects_have_the_keys_that_are_named(client, server):
    """Seeds with which this model writes further keys where it may."""
    formats = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OPEN}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": OPEN}}]
    for seed in SEEDS:
        assert json.loads(ask(client, seed, **formats).message.content).keys() <= {"ok"}
        (call, *_) = ask(client, seed, tools=tools, tool_choice="required").message.tool_calls
        assert json.loads(call.function.arguments).keys() <= {"ok"}
    settings = server.services.settings
    limits = dataclasses.replace(settings.limits, additional_properties=True)
    server.services.settings = dataclasses.replace(settings, limits=limits)
    try:
        long = [
            client.chat.completions.create(
                model="tiny", messages=ASKED, seed=seed, temperature=1.2, max_tokens=60, **formats
            ).choices[0]
            for seed in SEEDS
        ]
    finally:
        server.services.settings = settings
    assert any(each.finish_reason == "length" or '": ' in each.message.content[8:] for each in long)


CUT = {
    "/v1/chat/completions": {
        "messages": ASKED,
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "/v1/completions": {"prompt": "hello", "max_tokens": 4, "guided_json": SCHEMA},
    "/v1/responses": {
        "input": "hello",
        "max_output_tokens": 4,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": ASKED,
        "max_tokens": 4,
        "tools": [{"name": "weather", "input_schema": CITY}],
        "tool_choice": {"type": "any"},
    },
    "/api/chat": {"messages": ASKED, "format": SCHEMA, "options": {"num_predict": 4}},
}


@pytest.mark.parametrize("route", CUT)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_says_why_it_is_not_complete(server, route, stream):
    body = {"model": "tiny", **CUT[route], "stream": stream}
    text = httpx.post(server.url + route, json=body, timeout=120).text
    name = CUT[route].get("max_tokens") and "max_tokens"
    name = name or ("max_output_tokens" if "input" in CUT[route] else "options.num_predict")
    assert f"The answer was cut at '{name}' (4): the required format is not complete." in text


def test_a_call_is_required(client):
    named = set()
    for seed in range(10):
        choice = ask(client, seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=seed % 2 == 0)
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert len(calls) == 1 or seed % 2 == 0
        for call in calls:
            schema = next(
                t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call.function.name
            )
            jsonschema_rs.validator_for(schema).validate(json.loads(call.function.arguments))
            named.add(call.function.name)
    assert named


def test_with_tools_an_answer_is_a_call_or_follows_the_format(client):
    kinds = set()
    for seed in range(24):
        choice = ask(client, seed, tools=TOOLS, extra_body={"guided_regex": "[<a-d]b?"})
        kinds.add(bool(choice.message.tool_calls))
        if not choice.message.tool_calls:
            assert re.fullmatch("[<a-d]b?", choice.message.content)
    assert False in kinds


def test_an_answer_goes_on_after_its_engine_was_killed(server, client):
    """Tokens so far are read again by the next engine's matcher."""
    fields = {"extra_body": {"guided_regex": "[a-c]{200}"}, "logprobs": True}
    expected = ask(client, 7, **fields)
    model = server.services.engines.models()[0]
    seen = []

    def read():
        stream = client.chat.completions.create(
            model="tiny", messages=ASKED, seed=7, temperature=1.2, stream=True, logprobs=True,
            extra_body=fields["extra_body"],
        )  # fmt: skip
        for chunk in stream:
            seen.extend(choice.delta.content or "" for choice in chunk.choices)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: sum(map(len, seen)) > 20)
    os.kill(model.supervisor.pid, signal.SIGKILL)
    thread.join(60)
    assert model.supervisor.resumed >= 1
    assert "".join(seen) == expected.message.content


REFUSED = [
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs.json", "objekt"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "object"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "empty"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag", "not supported"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "also"),
    ({"guided_json": {"not": {}}}, "guided_json", "not"),
    ({"guided_json": {"enum": []}}, "guided_json", "Unsatisfiable"),
    ({"guided_json": {"$ref": "https://example.org/x"}}, "guided_json", "example.org"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_grammar": 'root ::= "a'}, "guided_grammar", ""),
    ({"guided_regex": "a" * 9000}, "guided_regex", "8192"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "guided_regex"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
        "response_format",
        "must be a string",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "y"}}}],
            "tool_choice": "required",
        },
        "tools",
        "Invalid type",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_followed_is_refused_before_anything_begins(client, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASKED, stream=True, extra_body=fields)
    assert caught.value.body["param"] == param
    assert words in caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]


def test_formats_that_say_nothing(client):
    for form in ({"type": "text"}, None):
        assert ask(client, max_tokens=2, response_format=form).finish_reason == "length"


def test_fields_inside_that_mean_nothing_are_told(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        extra_body={"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}},
    )
    assert answer.warnings == ["Unknown field 'structured_outputs.whitespace_pattern' was ignored."]


def test_responses(client):
    answer = client.responses.parse(model="tiny", input="hello", text_format=Order, temperature=1.2)
    assert isinstance(answer.output_parsed, Order)
    assert answer.text.format.type == "json_schema"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model="tiny",
            input="x",
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}},
        )
    assert caught.value.body["param"] == "text.format"
    tool = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    forced = client.responses.create(
        model="tiny", input="x", tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = forced.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert forced.tool_choice.name == "weather"


@pytest.mark.parametrize("route", ["chat", "generate"])
def test_ollama(server, route):
    body = {"model": "tiny", "stream": False, "format": SCHEMA, "options": {"seed": 2}}
    body |= {"messages": ASKED} if route == "chat" else {"prompt": "hello"}
    told = httpx.post(f"{server.url}/api/{route}", json=body, timeout=60).json()
    Order.model_validate_json(told["message"]["content"] if route == "chat" else told["response"])
    for form, status in (("json", 200), ("xml", 400), ({"type": "y"}, 400)):
        answer = httpx.post(
            f"{server.url}/api/{route}",
            json={**body, "format": form, "options": {"num_predict": 5}},
            timeout=60,
        )
        assert answer.status_code == status
        assert status == 200 or "'format'" in answer.json()["error"]


def test_anthropic(server):
    body = {"model": "tiny", "max_tokens": 900, "messages": ASKED}
    form = {"output_format": {"type": "json_schema", "schema": SCHEMA}}
    told = httpx.post(f"{server.url}/v1/messages", json={**body, **form}, timeout=60).json()
    Order.model_validate_json(told["content"][0]["text"])
    tools = {
        "tools": [{"name": "weather", "input_schema": CITY}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    told = httpx.post(f"{server.url}/v1/messages", json={**body, **tools}, timeout=60).json()
    assert told["stop_reason"] == "tool_use"
    jsonschema_rs.validator_for(CITY).validate(told["content"][0]["input"])


THINK, THOUGHT, CALL = VOCAB, VOCAB + 1, VOCAB + 2


def post(server, path, **fields):
    body = {"model": "thinker", "messages": ASKED, "temperature": 1.2, **fields}
    return httpx.post(server.url + path, json=body, timeout=60).json()


def test_calls_that_the_model_begins_itself_follow_their_schemas(server):
    called = 0
    for seed in SEEDS:
        fields = {"tools": TOOLS, "max_tokens": 200, "parallel_tool_calls": False, "seed": seed}
        bias = {str(CALL): 6, str(THINK): -100, str(THOUGHT): -100}
        (choice,) = post(server, "/v1/chat/completions", **fields, logit_bias=bias)["choices"]
        for call in choice["message"].get("tool_calls", ()):
            called += 1
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
            arguments = json.loads(call["function"]["arguments"])
            jsonschema_rs.validator_for(schemas[call["function"]["name"]]).validate(arguments)
            assert choice["finish_reason"] == "tool_calls"
    assert called > 1


@pytest.mark.parametrize("budget", [9, 0])
def test_an_answer_comes_once_the_budget_of_thoughts_is_used(server, budget):
    fields = {"thinking_token_budget": budget, "max_tokens": 24, "seed": 1, "ignore_eos": True}
    fields |= {"logit_bias": {str(THOUGHT): -100}, "return_token_ids": True}
    answer = post(server, "/v1/chat/completions", chat_template_kwargs={"enable_thinking": True}, **fields)
    (choice,) = answer["choices"]
    assert choice["token_ids"].index(THOUGHT) == budget
    assert len(choice["token_ids"]) == 24
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 1
    assert choice["message"]["content"]
    assert "warnings" not in answer


def test_anthropic_s_budget_is_the_same(server):
    thinking = {"type": "enabled", "budget_tokens": 9}
    answer = post(server, "/v1/messages", max_tokens=40, thinking=thinking, temperature=1)
    assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 10
