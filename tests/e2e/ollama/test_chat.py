"""Ollama's API, from an engine whose tokens are known."""

import json

import httpx
import pytest

from llmbox.app.config.model_settings import MemorySettings
from llmbox.app.config.settings import Settings
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


def test_a_call_that_is_cut_has_the_arguments_so_far(http):
    seen, size = [], whole(http, "/api/chat", model="caller", messages=ASKED, tools=TOOLS)["eval_count"]
    for most in range(size - 25, size - 1, 2):
        fields = {"model": "caller", "messages": ASKED, "tools": TOOLS, "options": {"num_predict": most}}
        message = whole(http, "/api/chat", **fields)["message"]
        *parts, last = lines(http, "/api/chat", **fields)
        calls = message.get("tool_calls", [])
        assert calls == [call for part in parts for call in part["message"].get("tool_calls", [])]
        assert message["content"] == "".join(part["message"]["content"] for part in parts)
        assert "<tool_call>" not in message["content"]
        if last["done_reason"] == "length":
            seen += calls
    assert {"function": {"name": "weather", "arguments": {}}} in seen
    assert CALLED in seen


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
    told = http.get("/api/version").json()
    assert set(told) == {"version"}
    assert tuple(map(int, told["version"].split("."))) >= (0, 6, 4)  # what GitHub Copilot requires of Ollama


@pytest.mark.parametrize(
    ("path", "fields", "status", "word"),
    [
        ("/api/chat", {"model": "nobody"}, 404, "nobody"),
        ("/api/chat", {"options": {"temperature": 9}}, 400, "temperature"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
        ("/api/chat", {"tools": TOOLS}, 400, "tools"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["a"]}]},
            400,
            "cannot read images",
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 1500}]}, 400, "context"),
        ("/api/chat", {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"top_logprobs": 2}, 400, "logprobs"),
        ("/api/generate", {"prompt": "x", "raw": True, "options": {"top_k": 10**6}}, 400, "options.top_k"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ],
)
def test_errors_are_texts(http, path, fields, status, word):
    asked = {"messages": ASKED} if path == "/api/chat" else {}
    answer = http.post(path, json={"model": "plain", **asked, **fields})
    assert answer.status_code == status
    assert word in answer.json()["error"]


def test_what_is_ignored_is_told(http):
    options = {"num_ctx": 8192, "num_gpu": 1, "repeat_last_n": 64, "mirostat": 0, "moods": 1}
    fields = {"keep_alive": "5m", "options": options, "truncate": True, "shift": False}
    warnings = whole(http, "/api/chat", model="plain", messages=ASKED, **fields)["warnings"]
    for word in ("keep_alive", "num_ctx", "num_gpu", "repeat_last_n", "moods", "truncate"):
        assert sum(word in warning for warning in warnings) == 1, word
    assert len(warnings) == 6


def test_a_raw_prompt_has_no_template(http):
    ids = http.post("/tokenize", json={"model": "plain", "prompt": "hello"}).json()["count"]
    told = whole(http, "/api/generate", model="plain", prompt="hello", raw=True, system="be kind")
    assert (told["response"], told["prompt_eval_count"]) == ("one two three", ids)
    assert any("system" in warning for warning in told["warnings"])
    *parts, last = lines(http, "/api/generate", model="caller", prompt="hello", raw=True)
    assert "".join(part["response"] for part in parts) == ANSWERS["caller"]
    assert last["prompt_eval_count"] == ids


@pytest.mark.parametrize("raw", [False, True])
def test_logprobs_of_each_token(http, raw):
    fields = {"model": "plain", "prompt": "hello", "logprobs": True, "top_logprobs": 2, "raw": raw}
    told = whole(http, "/api/generate", **fields)
    assert "".join(each["token"] for each in told["logprobs"]) == "one two three"
    assert {len(each["top_logprobs"]) for each in told["logprobs"]} == {2}
    streamed = [
        entry for part in lines(http, "/api/generate", **fields) for entry in part.get("logprobs", [])
    ]
    assert streamed == told["logprobs"]
    chosen = whole(http, "/api/chat", model="plain", messages=ASKED, logprobs=True)["logprobs"]
    assert [each["token"] for each in chosen] == [each["token"] for each in told["logprobs"]]
    assert "logprobs" not in whole(http, "/api/generate", model="plain", prompt="hello", raw=raw)


@pytest.mark.parametrize("raw", [False, True])
def test_num_predict_is_at_most_so_many(http, raw):
    told = whole(http, "/api/generate", model="plain", prompt="x", raw=raw, options={"num_predict": 99_999})
    assert (told["response"], told["done_reason"]) == ("one two three", "stop")
    cut = whole(
        http,
        "/api/generate",
        model="plain",
        prompt="x" * 1010,
        raw=True,
        options={"num_predict": 99_999},
    )
    assert cut["prompt_eval_count"] + cut["eval_count"] <= 1024


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "application/x-www-form-urlencoded",  # curl -d
        "application/octet-stream",  # bytes that aiohttp sends, as LiteLLM does
        "text/plain; charset=utf-8",
        "application/json",
    ],
)
def test_bodies_without_their_type_are_taken_from_programs(http, kind):
    body = json.dumps({"model": "plain", "prompt": "x", "stream": False})
    headers = {} if kind is None else {"Content-Type": kind}
    assert http.post("/api/generate", content=body, headers=headers).json()["response"] == "one two three"
    typed = kind == "application/json"
    for page in ({"Origin": str(http.base_url).rstrip("/")}, {"Sec-Fetch-Site": "same-origin"}):
        answer = http.post("/api/generate", content=body, headers=headers | page)
        assert answer.status_code == (200 if typed else 415)
    answer = http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == (400 if typed else 415)
