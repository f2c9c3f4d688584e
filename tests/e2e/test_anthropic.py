"""Anthropic's Messages API, from an engine whose tokens are known."""

import json

import httpx
import pytest

from support.cli_box import PATIENCE, until
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import byte_level, write_text_files

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {
    "thinker": "<think>\nhm\n</think>\n\nYes, 你好.",
    "caller": f"Let me look.\n{CALL}\n{CALL}",
    "plain": "one two three",
}
ASKED = {"max_tokens": 300, "messages": [{"role": "user", "content": "hello"}]}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
TOOLS = {"tools": [{"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}]}
LOOK = {"type": "text", "text": "Let me look."}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load_scripted(root, ANSWERS, TEMPLATE)
        slow = write_text_files(root / "slow", byte_level())
        write_model(slow, vocab_size=300, context=1024, script=[72, 73], step_delay=0.03, hold_at=800)
        server.load(slow, "slow")
        yield server


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        yield http


def ask(http, model, path="/v1/messages", **fields) -> dict:
    answer = http.post(path, json={"model": model, **ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http, model, **fields) -> tuple[dict, list[str]]:
    """The message that the events add up to, as Anthropic's client puts it together, and their names."""
    names, message = [], {}
    text = http.post("/v1/messages", json={"model": model, **ASKED, "stream": True, **fields}).text
    for event in text.removesuffix("\n\n").split("\n\n"):
        first, _, second = event.partition("\n")
        name, data = first.removeprefix("event: "), json.loads(second.removeprefix("data: "))
        assert data["type"] == name
        names.append(name)
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(data["content_block"] | {"json": ""})
            case "content_block_delta":
                block, delta = message["content"][data["index"]], data["delta"]
                for field, key in (("text", "text"), ("thinking", "thinking"), ("json", "partial_json")):
                    block[field] = block.get(field, "") + delta.get(key, "")
            case "message_delta":
                message |= data["delta"] | {"usage": data["usage"]}
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
        for field in {"text", "thinking"} - {block["type"]}:
            block.pop(field, None)
    return message, names


def without_id(blocks: list[dict]) -> list[dict]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize(
    ("model", "fields", "blocks", "reason"),
    [
        ("plain", {}, [{"type": "text", "text": "one two three"}], "end_turn"),
        (
            "thinker",
            THINKS,
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Yes, 你好."},
            ],
            "end_turn",
        ),
        (
            "caller",
            TOOLS,
            [LOOK, *[{"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}] * 2],
            "tool_use",
        ),
        ("plain", {"max_tokens": 1}, None, "max_tokens"),
        ("plain", {"stop_sequences": ["three", "two"]}, [{"type": "text", "text": "one "}], "stop_sequence"),
    ],
)
def test_whole_and_streamed_are_the_same_message(http, model, fields, blocks, reason):
    message = ask(http, model, **fields)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", model)
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == ("two" if reason == "stop_sequence" else None)
    if blocks is not None:
        assert without_id(message["content"]) == blocks
    again, names = streamed(http, model, **fields)
    assert without_id(again["content"]) == without_id(message["content"])
    assert (again["stop_reason"], again["stop_sequence"]) == (reason, message["stop_sequence"])
    assert again["usage"]["output_tokens"] == message["usage"]["output_tokens"] > 0
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == len(message["content"])


def test_without_thinking_the_model_is_told_not_to(http):
    texts = []
    for fields in ({}, THINKS):
        ids = http.post(
            "/tokenize",
            json={
                "model": "thinker",
                "messages": ASKED["messages"],
                "chat_template_kwargs": {"enable_thinking": bool(fields)},
            },
        ).json()["count"]
        assert ask(http, "thinker", "/v1/messages/count_tokens", **fields)["input_tokens"] == ids
        texts.append(ask(http, "thinker", **fields)["usage"]["input_tokens"])
    assert texts[0] != texts[1]


def test_results_of_tools_go_back(http):
    (_, first, second) = ask(http, "caller", **TOOLS)["content"]
    result = {
        "type": "tool_result",
        "tool_use_id": first["id"],
        "content": [{"type": "text", "text": "rain"}],
    }
    failed = {"type": "tool_result", "tool_use_id": second["id"], "content": "none", "is_error": True}
    said = [
        *ASKED["messages"],
        {"role": "assistant", "content": [LOOK, first, second]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "And?"}]},
    ]
    call = {"name": "weather", "arguments": '{"city": "Köln"}'}
    calls = [{"id": each["id"], "type": "function", "function": call} for each in (first, second)]
    chat = [
        {"role": "system", "content": "Be\nbrief"},
        *ASKED["messages"],
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": first["id"]},
        {"role": "tool", "content": "Error: none", "tool_call_id": second["id"]},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    kwargs = {"enable_thinking": False}
    expected = http.post(
        "/tokenize",
        json={"model": "caller", "messages": chat, "tools": tools, "chat_template_kwargs": kwargs},
    ).json()["count"]
    system = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief"},
    ]
    fields = {**TOOLS, "messages": said, "system": system}
    assert ask(http, "caller", "/v1/messages/count_tokens", **fields)["input_tokens"] == expected
    usage = ask(http, "caller", **fields)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected


@pytest.mark.parametrize(
    ("fields", "status", "kind", "word"),
    [
        ({"model": "nobody"}, 404, "not_found_error", "nobody"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 10_000}, 400, "invalid_request_error", "context"),
        ({"temperature": 5}, 400, "invalid_request_error", "temperature"),
        (TOOLS, 400, "invalid_request_error", "tools"),
        (
            {**TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
            400,
            "invalid_request_error",
            "tool_choice",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400,
            "invalid_request_error",
            "web_search",
        ),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "image",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3_000_000}]}, 413, "request_too_large", "large"),
    ],
)
def test_errors_have_anthropics_shape(http, fields, status, kind, word):
    answer = http.post("/v1/messages", json={"model": "plain", **ASKED, **fields})
    assert answer.status_code == status
    told = answer.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == kind
    assert word in told["error"]["message"]


def test_a_stream_that_breaks_off_ends_with_an_error_event(server, http):
    body = {"model": "slow", **ASKED, "max_tokens": 900, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as answer:
        lines = answer.iter_lines()
        while "text_delta" not in next(lines):
            pass
        server.call(cancel_all(server))
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    told = json.loads(rest[-1].removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["code"] == "request_cancelled"


def test_a_client_that_leaves_ends_its_request(server, http):
    body = {"model": "slow", **ASKED, "max_tokens": 900, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as answer:
        lines = answer.iter_lines()
        while "text_delta" not in next(lines):
            pass
        assert len(server.services.gateway.in_flight()) == 1
    until(lambda: not server.services.gateway.in_flight())


async def cancel_all(server):
    for each in server.services.gateway.in_flight():
        server.services.gateway.cancel(each.id)


def test_what_is_ignored_is_told(http):
    warnings = ask(http, "thinker", **THINKS, moods=1)["warnings"]
    assert [word for word in ("moods", "budget_tokens") if any(word in each for each in warnings)] == [
        "moods",
        "budget_tokens",
    ]
    _, names = streamed(http, "plain", moods=1)
    assert "message_stop" in names
