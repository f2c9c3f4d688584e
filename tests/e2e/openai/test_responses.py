"""OpenAI's Responses API through the official client, from an engine whose tokens are known."""

import json

import pytest

from support.cli_box import until
from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.stored import load_models

openai = DeferredModule("openai")

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {"plain": "one two three", "caller": f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}\n{CALL}"}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data")) as server:
        load_models(server, root, ANSWERS, TEMPLATE)
        yield server


def told(response) -> list[tuple]:
    """The items in short."""
    short = {
        "message": lambda item: (item.status, item.content[0].text),
        "reasoning": lambda item: (item.content[0].text,),
        "function_call": lambda item: (item.status, item.name, json.loads(item.arguments)),
    }
    return [(item.type, *short[item.type](item)) for item in response.output]


@pytest.mark.parametrize(
    ("model", "fields", "items", "status"),
    [
        ("plain", {}, [("message", "completed", "one two three")], "completed"),
        ("plain", {"max_output_tokens": 1}, None, "incomplete"),
        (
            "caller",
            {"tools": TOOLS, "tool_choice": "auto"},
            [
                ("reasoning", "hm"),
                ("message", "completed", "Let me look."),
                *[("function_call", "completed", "weather", {"city": "Köln"})] * 2,
            ],
            "completed",
        ),
    ],
)
def test_whole_and_streamed_are_the_same_response(client, model, fields, items, status):
    response = client.responses.create(model=model, input="hello", instructions="Be brief", **fields)
    assert response.status == status
    assert response.id.startswith("resp_")
    if items is not None:
        assert told(response) == items
    else:
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"
    thoughts = response.usage.output_tokens_details.reasoning_tokens
    assert (thoughts > 0) == (model == "caller")
    with client.responses.stream(model=model, input="hello", instructions="Be brief", **fields) as stream:
        events = list(stream)
        again = stream.get_final_response() if status == "completed" else events[-1].response
    assert told(again) == told(response)
    assert again.usage == response.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == f"response.{status}"
    assert names.count("response.output_item.added") == len(response.output)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text


def test_a_call_that_is_cut_is_an_incomplete_item(client):
    whole = client.responses.create(model="caller", input="hello", tools=TOOLS).usage.output_tokens
    seen = []
    for most in range(whole - 25, whole - 3, 7):
        fields = {"model": "caller", "input": "hello", "tools": TOOLS, "max_output_tokens": most}
        response = client.responses.create(**fields)
        *_, last = client.responses.create(stream=True, **fields)
        calls, again = (
            [(item.status, item.name, item.arguments) for item in each.output if item.type == "function_call"]
            for each in (response, last.response)
        )
        assert response.status == last.response.status == "incomplete"
        assert calls == again
        assert "<tool_call>" not in response.output_text
        assert calls[0] == ("completed", "weather", '{"city": "Köln"}')
        seen += calls[1:]
    assert {status for status, _, _ in seen} == {"incomplete"}
    assert any(arguments.startswith('{"city') and arguments[-1] != "}" for _, _, arguments in seen)


def test_a_conversation_goes_on_with_its_items(client):
    first = client.responses.create(model="caller", input="hello", tools=TOOLS)
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    items = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": calls[0], "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": calls[1],
            "output": [{"type": "input_text", "text": "sun"}],
        },
        {"type": "message", "role": "user", "content": "And?"},
    ]
    function = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"name": "weather", "arguments": '{"city": "Köln"}'}
    chat = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": id_, "type": "function", "function": call} for id_ in calls],
        },
        {"role": "tool", "tool_call_id": calls[0], "content": "rain"},
        {"role": "tool", "tool_call_id": calls[1], "content": "sun"},
        {"role": "user", "content": "And?"},
    ]
    same = client.chat.completions.create(model="caller", messages=chat, tools=[function])
    response = client.responses.create(model="caller", input=items, tools=TOOLS)
    assert response.usage.input_tokens == same.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": 1}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "newest"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"tools": TOOLS}, "tools"),
        ({"model": "caller", "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "plain", "input": "hello", **fields})
    assert caught.value.param == param


def test_a_stream_that_breaks_off_ends_with_an_error_event(server, client):
    events = client.responses.create(model="slow", input="hello", stream=True, max_output_tokens=900)
    while next(events).type != "response.output_text.delta":
        pass
    server.call(cancel_all(server))
    last = list(events)[-1]
    assert (last.type, last.code) == ("error", "request_cancelled")
    until(lambda: not server.services.gateway.in_flight())


async def cancel_all(server):
    for each in server.services.gateway.in_flight():
        server.services.gateway.cancel(each.id)


def test_harmless_fields_pass_and_ignored_ones_are_told(client):
    fields = {"store": False, "truncation": "disabled", "text": {"format": {"type": "text"}}}
    assert not hasattr(client.responses.create(model="plain", input="hello", **fields), "warnings")
    response = client.responses.create(
        model="plain",
        input="hello",
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "high"},
        extra_body={"moods": 1},
    )
    assert len(response.warnings) == 3
    assert response.seed
