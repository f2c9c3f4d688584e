"""Anthropic's Messages API, from an engine whose tokens are known."""

import json

import msgspec
import pytest

from llmbox.app.http.anthropic.conversation import chat_messages
from llmbox.app.http.anthropic.request_types import CountTokensRequest
from support.cli_box import until
from support.deferred_module import DeferredModule
from support.messages_api import ANSWERS, ASKED, TEMPLATE, THINKS, TOOLS, ask, streamed
from support.openai_server import serving
from support.stored import load_models

anthropic = DeferredModule("anthropic")

SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
LOOK = {"type": "text", "text": "Let me look."}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data")) as server:
        load_models(server, root, ANSWERS, TEMPLATE)
        yield server


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
    assert message["id"].startswith("msg_")
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


def test_a_failed_tool_that_returns_an_image_says_so():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    failed = {"type": "tool_result", "tool_use_id": "t", "content": [image], "is_error": True}
    asked = {"model": "m", "messages": [{"role": "user", "content": [failed]}]}
    (result,) = chat_messages(msgspec.convert(asked, CountTokensRequest), late_system=False)
    assert result["role"] == "tool"
    assert [part["type"] for part in result["content"]] == ["text", "image_url"]
    assert result["content"][0]["text"] == "Error: "


def test_a_call_that_is_cut_has_the_input_so_far(http):
    seen, whole = [], ask(http, "caller", **TOOLS)["usage"]["output_tokens"]
    for most in range(whole - 25, whole - 1, 2):
        message, (again, _) = (call(http, "caller", max_tokens=most, **TOOLS) for call in (ask, streamed))
        assert message["stop_reason"] == again["stop_reason"] == "max_tokens"
        assert without_id(message["content"]) == without_id(again["content"])
        assert message["content"][0]["text"] in LOOK["text"]
        seen += [block["input"] for block in message["content"][1:]]
    assert {} in seen
    assert {"city": "Köln"} in seen


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
        (
            {"messages": [{"role": "user", "content": "x" * 1500}]},
            400,
            "invalid_request_error",
            "prompt is too long: 15",
        ),
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
        ({"container": "c"}, 400, "invalid_request_error", "container"),
        ({"speed": "fast"}, 400, "invalid_request_error", "speed"),
        ({"output_config": {"task_budget": {"total": 9}}}, 400, "invalid_request_error", "task_budget"),
        (
            {"output_config": {"format": SCHEMA}, "output_format": SCHEMA},
            400,
            "invalid_request_error",
            "output_config.format",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            400,
            "invalid_request_error",
            "output_config.format",
        ),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            400,
            "invalid_request_error",
            "compact_20260112",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            400,
            "invalid_request_error",
            "an image has",
        ),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "'stop_sequences'"),
        ({"messages": [{"role": "user", "content": "x" * 32_000_001}]}, 413, "request_too_large", "large"),
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
        "moods"
    ]
    _, names = streamed(http, "plain", moods=1)
    assert "message_stop" in names


def test_an_answer_ends_with_the_context_where_max_tokens_reach_further(http):
    size = ask(http, "plain", "/v1/messages/count_tokens")["input_tokens"]
    fits = ask(http, "plain", max_tokens=10_000)
    assert fits["stop_reason"] == "end_turn"
    long = ask(http, "slow", max_tokens=10_000, messages=[{"role": "user", "content": "x" * 950}])
    assert long["stop_reason"] == "model_context_window_exceeded"
    assert long["usage"]["input_tokens"] + long["usage"]["output_tokens"] == 1024 > size


def test_models_have_anthropics_shape_for_anthropics_clients(server, http):
    plain = http.get("/v1/models").json()
    assert plain["object"] == "list"
    ids = [each["id"] for each in plain["data"]]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == ids
        page = client.models.list(limit=2)
        assert ([each.id for each in page.data], page.has_more) == (ids[:2], True)
        assert [each.id for each in client.models.list(limit=2)] == ids
        assert [each.id for each in client.models.list(before_id=ids[3], limit=2).data] == ids[1:3]
        found = client.models.retrieve(ids[0])
        assert (found.display_name, found.type, found.lifecycle) == (ids[0], "model", "active")
        assert found.max_input_tokens == plain["data"][0]["context_window"]
        assert int(found.created_at.timestamp()) == plain["data"][0]["created"]
        for wrong in (
            lambda: client.models.retrieve("nobody"),
            lambda: client.models.list(after_id="nobody"),
        ):
            with pytest.raises(anthropic.NotFoundError) as error:
                wrong()
            assert error.value.body["error"]["type"] == "not_found_error"
    by_version = http.get(f"/v1/models/{ids[0]}", headers={"anthropic-version": "2023-06-01"}).json()
    assert by_version["type"] == "model"
