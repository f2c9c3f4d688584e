"""Which prompt a request of the Messages API makes, by the tokens of the chat that means the same."""

import httpx
import msgspec
import pytest

from llmbox.app.http.anthropic.request_types import MessagesRequest
from llmbox.app.http.anthropic.translate import chat_fields
from support.cli_box import PATIENCE
from support.messages_api import ANSWERS, ASKED, TEMPLATE, TOOLS, ask, streamed
from support.openai_server import serving

STRICT = (
    "{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{%- endif %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Like Mistral's and Gemma's."""
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load_scripted(root, ANSWERS, TEMPLATE)
        server.load_scripted(root, {"strict": "one"}, STRICT)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            yield http


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


CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "y"}


@pytest.mark.parametrize("model", ["plain", "strict"])
@pytest.mark.parametrize("block", [CALL, RESULT])
@pytest.mark.parametrize("before", [[], [turn("user", "hello")]])
def test_a_system_message_holds_no_calls_of_tools(http, model, block, before):
    body = {"model": model, "messages": [*before, turn("system", [block])], "max_tokens": 1}
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"messages[{len(before)}].content"


def test_a_late_system_message_after_a_turn_without_words_is_no_fault(http):
    body = {"model": "strict", "messages": [turn("user", [CALL]), turn("system", "z")], "max_tokens": 1}
    assert http.post("/v1/messages", json=body).status_code < 500


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
def test_answers_follow_a_schema(name):
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
