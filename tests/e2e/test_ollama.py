"""Ollama's API, from an engine whose tokens are known."""

import json

import httpx
import pytest

from llmbox.app.settings import MemorySettings, Settings
from support.cli_box import PATIENCE
from support.openai_server import serving

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + (m.tool_call_id or '') + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- call.id + call.function | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}{#- </think> -#}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {"plain": "one two three", "caller": f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}"}
ASKED = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    alone = Settings(memory=MemorySettings(load_on_request=False))
    with serving(tmp_path_factory.mktemp("data"), controlled=True, settings=alone) as server:
        server.load_scripted(root, ANSWERS, TEMPLATE)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            yield http


def whole(http, path: str, **fields) -> dict:
    answer = http.post(path, json={"stream": False, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(http, path: str, **fields) -> list[dict]:
    answer = http.post(path, json=fields)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_whole_and_in_lines(http):
    fields = {"model": "caller:latest", "messages": ASKED, "tools": TOOLS, "think": True}
    told = whole(http, "/api/chat", **fields)
    message = {"role": "assistant", "content": "Let me look.", "thinking": "hm", "tool_calls": [CALLED]}
    assert told["message"] == message
    assert (told["model"], told["done"], told["done_reason"]) == ("caller:latest", True, "stop")
    assert told["eval_count"] > 0
    assert told["prompt_eval_count"] > 0
    *parts, last = lines(http, "/api/chat", **fields)
    assert not any(part["done"] for part in parts)
    assert "".join(part["message"]["content"] for part in parts) == "Let me look."
    assert "".join(part["message"].get("thinking", "") for part in parts) == "hm"
    assert [call for part in parts for call in part["message"].get("tool_calls", [])] == [CALLED]
    assert (last["message"]["content"], last["done"], last["eval_count"]) == ("", True, told["eval_count"])


def test_a_text_whole_and_in_lines(http):
    fields = {"model": "plain", "prompt": "hello", "system": "Be brief", "options": {"stop": [" three"]}}
    assert whole(http, "/api/generate", **fields)["response"] == "one two"
    *parts, last = lines(http, "/api/generate", **fields)
    assert "".join(part["response"] for part in parts) == "one two"
    assert (last["response"], last["done_reason"]) == ("", "stop")
    short = whole(http, "/api/generate", **{**fields, "options": {"num_predict": 1}})
    assert (short["done_reason"], short["eval_count"]) == ("length", 1)


def test_thoughts_are_left_out_where_they_are_not_wanted(http):
    told = whole(http, "/api/chat", model="caller", messages=ASKED, think=False)
    assert "thinking" not in told["message"]


def test_results_answer_calls_in_their_order(http):
    conversation = [
        *ASKED,
        {"role": "assistant", "tool_calls": [CALLED, CALLED]},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    calls = [{"name": "weather", "arguments": '{"city": "Köln"}'}] * 2
    ids = ["call00000", "call00001"]
    chat = [
        *ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id_, "function": call} for id_, call in zip(ids, calls, strict=True)],
        },
        {"role": "tool", "tool_call_id": ids[0], "content": "rain"},
        {"role": "tool", "tool_call_id": ids[1], "content": "sun"},
    ]
    body = {"model": "caller", "messages": chat, "tools": TOOLS}
    expected = http.post("/tokenize", json=body).json()["count"]
    told = whole(http, "/api/chat", model="caller", messages=conversation, tools=TOOLS)
    assert told["prompt_eval_count"] == expected


def test_nothing_asked_loads_the_model(http):
    for path in ("/api/chat", "/api/generate"):
        told = http.post(path, json={"model": "plain"}).json()
        assert (told["done"], told["done_reason"]) == (True, "load")


def test_models_and_version(http):
    assert {model["name"] for model in http.get("/api/tags").json()["models"]} == set(ANSWERS)
    assert set(http.get("/api/version").json()) == {"version"}


@pytest.mark.parametrize(
    ("path", "fields", "status", "word"),
    [
        ("/api/chat", {"model": "nobody"}, 404, "nobody"),
        ("/api/chat", {"options": {"temperature": 9}}, 400, "temperature"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
        ("/api/chat", {"tools": TOOLS}, 400, "tools"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400, "Images"),
        ("/api/chat", {"options": {"num_predict": 9999}}, 400, "context"),
        ("/api/generate", {"prompt": "x", "raw": True}, 400, "raw"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ],
)
def test_errors_are_texts(http, path, fields, status, word):
    asked = {"messages": ASKED} if path == "/api/chat" else {}
    answer = http.post(path, json={"model": "plain", **asked, **fields})
    assert answer.status_code == status
    assert word in answer.json()["error"]


def test_what_is_ignored_is_told(http):
    fields = {"keep_alive": "5m", "options": {"num_ctx": 8192, "num_gpu": 1}}
    told = whole(http, "/api/chat", model="plain", messages=ASKED, **fields)
    assert len(told["warnings"]) == 3
