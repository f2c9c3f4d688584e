"""Anthropic's Messages API, from an engine whose tokens are known."""

import json

import anthropic
import httpx
import msgspec
import pytest

from llmbox.app.http.anthropic.fields import MessagesRequest
from llmbox.app.http.anthropic.translate import chat_fields
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
STRICT = (
    "{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{%- endif %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Like Mistral's and Gemma's."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {
    "thinker": "<think>\nhm\n</think>\n\nYes, 你好.",
    "caller": f"Let me look.\n{CALL}\n{CALL}",
    "plain": "one two three",
}
ASKED = {"max_tokens": 300, "messages": [{"role": "user", "content": "hello"}]}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
TOOLS = {"tools": [{"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}]}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
LOOK = {"type": "text", "text": "Let me look."}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load_scripted(root, ANSWERS, TEMPLATE)
        server.load_scripted(root, {"strict": "one"}, STRICT)
        slow = write_text_files(root / "slow", byte_level())
        write_model(slow, vocab_size=512, context=1024, script=[72, 73] * 512, step_delay=0.03, hold_at=800)
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


def test_an_answer_ends_with_the_context_where_max_tokens_reach_further(http):
    size = ask(http, "plain", "/v1/messages/count_tokens")["input_tokens"]
    fits = ask(http, "plain", max_tokens=10_000)
    assert fits["stop_reason"] == "end_turn"
    long = ask(http, "slow", max_tokens=10_000, messages=[{"role": "user", "content": "x" * 950}])
    assert long["stop_reason"] == "model_context_window_exceeded"
    assert long["usage"]["input_tokens"] + long["usage"]["output_tokens"] == 1024 > size


def chat_tokens(http, model, messages, **fields) -> int:
    body = {"model": model, "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    return http.post("/tokenize", json=body | fields).json()["count"]


def message_tokens(http, model, messages, **fields) -> int:
    return ask(http, model, "/v1/messages/count_tokens", messages=messages, **fields)["input_tokens"]


def turn(role, content):
    return {"role": role, "content": content}


def test_a_system_message_in_mid_conversation_stays_where_the_template_renders_it(http):
    said = [turn("user", "hello"), turn("system", [{"type": "text", "text": "be brief"}]), turn("user", "?")]
    as_chat = [turn("system", "kind"), turn("user", "hello"), turn("system", "be brief"), turn("user", "?")]
    assert message_tokens(http, "plain", said, system="kind") == chat_tokens(http, "plain", as_chat)
    assert ask(http, "plain", messages=said[:2])["stop_reason"] == "end_turn"
    first = [turn("system", "kind"), turn("user", "hello")]
    assert message_tokens(http, "plain", first) == chat_tokens(http, "plain", first)


def test_a_template_that_refuses_late_system_messages_gets_their_text_in_the_turn_before(http):
    said = [turn("user", "hello"), turn("system", "be brief")]
    as_chat = [turn("user", "hello\n<system-reminder>\nbe brief\n</system-reminder>")]
    assert message_tokens(http, "strict", said) == chat_tokens(http, "strict", as_chat)
    assert ask(http, "strict", messages=said)["stop_reason"] == "end_turn"


def test_consecutive_turns_of_a_role_are_one(http):
    said = [
        turn("user", "a"),
        turn("user", "b"),
        turn("assistant", "c"),
        turn("assistant", "d"),
        turn("user", "e"),
    ]
    as_chat = [turn("user", "a\nb"), turn("assistant", "c\nd"), turn("user", "e")]
    assert message_tokens(http, "strict", said) == chat_tokens(http, "strict", as_chat)


def test_an_answer_goes_on_from_the_assistants_last_turn(http):
    said = [turn("user", "hello"), turn("assistant", "one tw")]
    whole = {"continue_final_message": True, "add_generation_prompt": False}
    assert message_tokens(http, "plain", said) == chat_tokens(http, "plain", said, **whole)


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_answers_follow_a_schema(server, name):
    asked = SCHEMA if name == "output_format" else {"format": SCHEMA}
    fields = {"max_tokens": 5, "messages": ASKED["messages"], name: asked}
    request = msgspec.convert({"model": "plain", **fields}, MessagesRequest)
    wanted = chat_fields(request, late_system=True)["response_format"]
    assert wanted == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


def test_thoughts_of_earlier_turns_are_cleared_where_that_is_asked_for(http):
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    said = []
    for number in range(3):
        answer = [thought, {"type": "text", "text": "ok"}]
        said += [turn("user", str(number)), turn("assistant", answer)]
    said.append(turn("user", "?"))
    edit = {"type": "clear_thinking_20251015"}
    for keep, cleared in ((None, 2), ("all", 0), ({"type": "thinking_turns", "value": 2}, 1)):
        edits = {"edits": [edit | ({"keep": keep} if keep else {})]}
        told = ask(http, "plain", messages=said, context_management=edits)["context_management"]
        assert sum(each["cleared_thinking_turns"] for each in told["applied_edits"]) == cleared
        message, _ = streamed(http, "plain", messages=said, context_management=edits)
        assert message["usage"]["output_tokens"] > 0
        counted = ask(http, "plain", "/v1/messages/count_tokens", messages=said, context_management=edits)
        assert counted["context_management"]["original_input_tokens"] >= counted["input_tokens"]


def test_texts_in_documents_and_search_results_are_read(http):
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "b"},
        "title": "a",
    }
    found = {"type": "search_result", "source": "c", "title": "d", "content": [{"type": "text", "text": "e"}]}
    said = [turn("user", [document, found])]
    assert message_tokens(http, "plain", said) == chat_tokens(http, "plain", [turn("user", "a\nb\nd\nc\ne")])
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
    answer = http.post("/v1/messages", json={"model": "plain", **ASKED, "messages": [turn("user", [pdf])]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0].type")


def test_deferred_tools_are_offered_once_a_search_has_found_them(http):
    tool = TOOLS["tools"][0] | {"name": "later", "defer_loading": True}
    tools = [*TOOLS["tools"], tool]
    before = message_tokens(http, "caller", ASKED["messages"], tools=tools)
    assert before == message_tokens(http, "caller", ASKED["messages"], **TOOLS)
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    found = {"type": "tool_reference", "tool_name": "later"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    said = [*ASKED["messages"], turn("assistant", [use]), turn("user", [result])]
    shown = tool | {"defer_loading": False}
    whole = message_tokens(http, "caller", said, tools=[*TOOLS["tools"], shown])
    assert message_tokens(http, "caller", said, tools=tools) == whole


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


def test_what_an_agent_tells_of_itself_is_no_part_of_the_prompt(http):
    billing = {
        "type": "text",
        "text": "x-anthropic-billing-header: cc_version=2.1.197.123; cc_entrypoint=cli;",
    }
    kind = {"type": "text", "text": "kind"}
    tokens = {
        message_tokens(http, "plain", ASKED["messages"], system=system)
        for system in ([billing, kind], [kind], "kind")
    }
    assert len(tokens) == 1
    assert message_tokens(http, "plain", ASKED["messages"], system=[billing]) == message_tokens(
        http, "plain", ASKED["messages"]
    )
