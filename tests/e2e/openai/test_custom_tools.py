"""Tools that take a text, with a model of random weights whose texts follow the tool's grammar."""

import json
import re

import pytest

from llmbox.engine.ipc.spawn import Launch
from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.tiny_models import make_tiny_model, write_json

openai = DeferredModule("openai")

TEMPLATE = (
    "{%- for tool in tools or [] %}{{- tool.function.name + '\\n' }}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{{- m.content }}{%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{#- calls: <tool_call> -#}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
ASKED = [{"role": "user", "content": "hello"}]
LARK = 'start: "say" LF line{1,3}\nline: /[+"\\\\]{2,4}/ LF\n%import common.LF'
FOLLOWS = re.compile(r'say\n(?:[+"\\]{2,4}\n){1,3}')
CUSTOM = {"name": "run", "description": "Runs a text.", "format": {"type": "grammar"}}
CHAT_TOOL = {
    "type": "custom",
    "custom": {
        **CUSTOM,
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}},
    },
}
TOOL = {"type": "custom", **CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTION = {"type": "function", "name": "weather", "parameters": NOTHING}
SPACE = {"type": "namespace", "name": "box", "description": "x", "tools": [FUNCTION, TOOL]}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=4096)
    told = directory / "tokenizer_config.json"
    write_json(told, {**json.loads(told.read_text()), "chat_template": TEMPLATE})
    with serving(tmp_path_factory.mktemp("data"), Launch()) as server:
        server.load(directory, "tiny", device="cpu", threads=1, memory_bytes=256 << 20)
        with server.client() as client:
            yield client


def chat(client, **fields):
    return client.chat.completions.create(
        model="tiny", messages=fields.pop("messages", ASKED), temperature=1.2, seed=3, **fields
    )


def respond(client, **fields):
    return client.responses.create(
        model="tiny", input=fields.pop("input", "hello"), temperature=1.2, **fields
    )


def test_a_chat_calls_one_and_its_text_follows_the_grammar(client):
    fields = {"tools": [CHAT_TOOL], "tool_choice": {"type": "custom", "custom": {"name": "run"}}}
    answer = chat(client, **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.custom.name, answer.choices[0].finish_reason) == ("custom", "run", "tool_calls")
    assert FOLLOWS.fullmatch(call.custom.input)
    deltas = [
        each
        for chunk in chat(client, stream=True, **fields)
        for each in chunk.choices[0].delta.tool_calls or []
    ]
    assert (deltas[0].type, deltas[0].custom["name"]) == ("custom", "run")
    assert "".join(each.custom["input"] for each in deltas) == call.custom.input
    messages = [
        *ASKED,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    longer = chat(client, tools=[CHAT_TOOL], messages=messages, max_tokens=1)
    assert longer.usage.prompt_tokens > answer.usage.prompt_tokens + len(call.custom.input) / 4


def test_the_text_of_a_call_that_is_cut_is_a_beginning(client):
    fields = {"tools": [CHAT_TOOL], "tool_choice": {"type": "custom", "custom": {"name": "run"}}}
    answer, seen = chat(client, **fields), set()
    (whole,) = answer.choices[0].message.tool_calls
    size = answer.usage.completion_tokens
    for most in range(1, size - 1, size // 8):
        choice = chat(client, max_tokens=most, **fields).choices[0]
        assert choice.finish_reason == "length"
        assert not choice.message.content
        seen |= {call.custom.input for call in choice.message.tool_calls or ()}
    assert len(seen) > 1
    assert all(whole.custom.input.startswith(each) for each in seen)


def test_a_response_calls_one_in_a_namespace(client):
    choice = {"type": "custom", "name": "run", "namespace": "box"}
    answer = respond(client, tools=[SPACE], tool_choice=choice)
    (call,) = answer.output
    assert (call.type, call.name, call.namespace) == ("custom_tool_call", "run", "box")
    assert call.id.startswith("ctc_")
    assert FOLLOWS.fullmatch(call.input)
    events = list(respond(client, tools=[SPACE], tool_choice=choice, stream=True))
    kinds = [each.type for each in events]
    assert "response.custom_tool_call_input.delta" in kinds
    done = next(each for each in events if each.type == "response.custom_tool_call_input.done")
    assert FOLLOWS.fullmatch(done.input)
    items = [
        {"role": "user", "content": "hello"},
        call.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"},
    ]
    function = {"type": "function", "name": "weather", "namespace": "box"}
    following = respond(client, input=items, tools=[SPACE], tool_choice=function)
    (named,) = following.output
    assert (named.type, named.name, named.namespace) == ("function_call", "weather", "box")


def test_only_allowed_tools_are_called(client):
    tools = [FUNCTION, {**FUNCTION, "name": "clock"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    answer = respond(client, tools=tools, tool_choice=allowed)
    assert {item.name for item in answer.output} == {"clock"}


def test_tools_of_the_conversation_count_and_hosted_ones_are_left_out(client):
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [TOOL]},
        {"role": "user", "content": "hello"},
    ]
    hosted = [{"type": "web_search", "external_web_access": False}]
    answer = respond(client, input=items, tools=hosted, tool_choice="required", parallel_tool_calls=False)
    assert [item.name for item in answer.output] == ["run"]
    assert ["left out" in each for each in answer.warnings] == [True]


def test_answers_in_words_are_still_there_where_a_tool_has_a_grammar(client):
    answers = [respond(client, tools=[TOOL], max_output_tokens=8) for _ in range(4)]
    assert any(item.type == "message" and item.content[0].text for each in answers for item in each.output)


def test_pictures_that_tools_give_are_told_to_the_model(client):
    output = [{"type": "input_image", "image_url": "data:image/png;base64,"}]
    items = [
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": output},
    ]
    longer = respond(client, input=items, tools=[FUNCTION], max_output_tokens=1)
    items[1]["output"] = ""
    assert (
        longer.usage.input_tokens > respond(client, input=items, max_output_tokens=1).usage.input_tokens + 8
    )


def custom(**format_):
    return {"type": "custom", "name": "run", "format": {"type": "grammar", **format_}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "file_search", "vector_store_ids": []}], "tools[0].type"),
        ([{"type": "mcp", "server_label": "x"}], "tools[0].type"),
        ([{"name": "x"}], "tools[0].type"),
        ([SPACE, {**FUNCTION, "name": "box__weather"}], "tools[1].name"),
        ([{"type": "namespace", "name": "x"}], "tools[0]"),
        ([custom(syntax="lark")], "tools[0].format"),
        ([custom(syntax="lark", definition="start: /(?=a)b/")], "tools[0].custom.format.grammar.definition"),
        ([custom(syntax="lark", definition="start: missing")], "tools"),
        ([custom(syntax="regex", definition="[")], "tools[0].custom.format.grammar.definition"),
    ],
)
def test_what_cannot_be_honored_is_refused(client, tools, param):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, tools=tools)
    assert caught.value.param == param
