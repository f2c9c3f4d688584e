"""Every refusal that the API promises: status, code, param, and an engine that goes on serving."""

import json

import httpx
import pytest

from support.cli_box import PATIENCE
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import LLAMA2, byte_level, drawn_ids, write_text_files

openai = DeferredModule("openai")

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
CONTEXT = 256
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    options = {**drawn_ids(tokenizer), "context": CONTEXT}
    write_model(write_text_files(root / "one", tokenizer, LLAMA2), **options)
    write_model(write_text_files(root / "bare", tokenizer, None), **options, max_running=2, hold_at=5)
    with serving(tmp_path_factory.mktemp("data"), queue=2) as server:
        server.load(root / "one", "one")
        server.load(root / "bare", "bare")
        yield server


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        yield http
        assert http.post(CHAT, json={"model": "one", "messages": HELLO, "max_tokens": 2}).status_code == 200


def error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


BOTH = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**6}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": CONTEXT + 1}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "é" * 129}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": 1e9}, "timeout"),
    ({"first_token_timeout": -1}, "first_token_timeout"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"request_id": "a b"}, "request_id"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"user": "u" * 100_000}, "user"),
    ({"session_id": "u" * 513}, "session_id"),
    ({"safety_identifier": "u" * 513}, "safety_identifier"),
    ({"prompt_cache_key": "u" * 513}, "prompt_cache_key"),
    ({"priority": "high"}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "a"}, "guided_grammar"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}, "truncate_prompt_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids"),
]
CHAT_ONLY = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": HELLO * 2049}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": HELLO * 2}, "messages"),  # the template wants turns to alternate
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"max_completion_tokens": CONTEXT, "max_tokens": None}, "max_completion_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"store": True, "metadata": {"k" * 65: "v"}}, "metadata"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"echo": "yes"}, "echo"),
]
PLAIN_ONLY = [
    ({"include_reasoning": False}, "include_reasoning"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 2, "n": 4}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
]


def ask(http, path: str, fields: dict) -> httpx.Response:
    base = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    return http.post(path, json={"model": "one", "max_tokens": 4, **base, **fields})


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("fields", "param"), BOTH)
def test_bad_values_of_common_fields(http, path, fields, param):
    assert error(ask(http, path, fields), 400)["param"] == param


@pytest.mark.parametrize(("fields", "param"), CHAT_ONLY)
def test_bad_values_of_chat_fields(http, fields, param):
    assert error(ask(http, CHAT, fields), 400)["param"] == param


@pytest.mark.parametrize(("fields", "param"), PLAIN_ONLY)
def test_bad_values_of_completion_fields(http, fields, param):
    assert error(ask(http, PLAIN, fields), 400)["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "n": 1, "seed": -(2**63)},
        {"response_format": {"type": "text"}, "service_tier": "auto", "include_reasoning": True},
        {"user": "me", "metadata": {"a": "b"}, "session_id": "s", "priority": -5, "cache_salt": "x"},
        {"stop": None, "temperature": None, "logit_bias": None, "max_tokens": None, "stream_options": None},
        {"bad_words": ["fox"], "allowed_token_ids": [1, 2, 3], "logit_bias": {"3": -100}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_good_values_at_the_edges(http, path, fields):
    answer = ask(http, path, fields)
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "one", "temperature": NaN}', b'{"temperature": Infinity}', b'{"seed": 1e5}',
        b'{"temperature": 1e999}', b'{"n": 1, "n": 2}', b"{} {}", b"", b"[1]", b'"x"', b"\xef\xbb\xbf{}",
        b'{"model": "\xff"}', b'{"user": "\\ud800"}', b"[" * 1000, b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(http, path, body):
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    error(answer, 400)


def test_other_bodies(http):
    error(http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    error(http.post(PLAIN, json={"prompt": "x" * 2_000_001}), 413)
    error(http.put(CHAT, json={}), 405)
    error(http.post("/v1/responses", json={}), 400)
    error(http.post("/v1/moderations", json={}), 404)


def test_context_errors_name_the_numbers(http):
    told = error(ask(http, PLAIN, {"prompt": [5] * 300, "max_tokens": None}), 400)
    assert (told["code"], told["param"]) == ("context_length_exceeded", "prompt")
    assert "256" in told["message"]
    assert "300" in told["message"]
    told = error(ask(http, PLAIN, {"prompt": [5] * 200, "max_tokens": 57}), 400)
    assert (told["code"], told["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in told["message"] for number in ("256", "200", "57", "56"))
    told = error(ask(http, CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}), 400)
    assert (told["code"], told["param"]) == ("context_length_exceeded", "messages")
    assert ask(http, PLAIN, {"prompt": [5] * 200, "max_tokens": 56}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": CONTEXT}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "user": "u" * 513}, "user"),
        ("/v1/responses", {"input": "x", "temperature": 9}, "temperature"),
        ("/api/chat", {"messages": HELLO, "options": {"top_k": 10**6}}, "options.top_k"),
        ("/api/generate", {"prompt": "x", "options": {"top_k": 10**6}}, "options.top_k"),
        ("/api/chat", {"messages": HELLO, "options": {"stop": ["x"] * 17}}, "options.stop"),
    ],
)
def test_errors_of_other_dialects_name_the_field_that_was_sent(http, path, fields, name):
    answer = http.post(path, json={"model": "one", **fields})
    assert answer.status_code == 400
    assert f"'{name}'" in answer.text


def test_models_that_are_not_there(http):
    assert error(ask(http, CHAT, {"model": "absent"}), 404)["code"] == "model_not_found"
    assert error(ask(http, CHAT, {"model": None}), 400)["param"] == "model"
    assert error(ask(http, CHAT, {"model": "bare"}), 400)["code"] == "no_chat_template"


def test_a_full_queue_is_429_with_a_time_to_retry(server):
    with server.client() as client:
        open_ = {"model": "bare", "prompt": "x", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(**open_, stream=True) for _ in range(4)]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**open_)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**open_, stream=True)
        for stream in streams:
            stream.close()


def test_error_objects_mid_stream(server, tmp_path):
    tokenizer = byte_level()
    write_model(
        write_text_files(tmp_path / "dying", tokenizer),
        **drawn_ids(tokenizer),
        context=CONTEXT,
        hold_at=9,
    )
    server.load(tmp_path / "dying", "dying")
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        body = {"model": "dying", "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with http.stream("POST", PLAIN, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.call(server.services.engines.unload("dying"))
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "model_unloaded"
    assert events[-1]["error"].keys() == {"message", "type", "param", "code"}


def test_the_api_description_has_the_routes_and_their_ranges(server):
    document = httpx.get(server.url + "/openapi.json", timeout=PATIENCE).json()
    assert {CHAT, PLAIN, "/v1/models", "/tokenize", "/detokenize"} <= document["paths"].keys()
    schema = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert "temperature" in schema
    assert '"maximum": 2' in json.dumps(schema["temperature"])
