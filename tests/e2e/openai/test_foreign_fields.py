"""Fields of other servers that would change an answer: refused in every dialect."""

import httpx
import msgspec
import pytest

from llmbox.app.http.anthropic import request_types as anthropic
from llmbox.app.http.ollama import request_types as ollama
from llmbox.app.http.openai import request_types as openai
from llmbox.app.http.openai.unsupported import FOREIGN, _refusable
from llmbox.app.http.openai_responses import request_types as responses
from support.openai_server import serving

ASKED = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 4},
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/api/chat": {"messages": ASKED, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
    "/api/embed": {"input": "hello"},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("data"), controlled=True) as server:
        server.load_scripted(tmp_path_factory.mktemp("models"), {"plain": "one two"}, "")
        yield server.url


def post(url, route, **fields):
    body = {"model": "plain", **BODIES[route], **fields}
    return httpx.post(url + route, json=body, timeout=60)


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    "name", ["lora", "lora_request", "adapter", "mm_processor_kwargs", "logits_processors"]
)
def test_what_is_not_honored_is_refused(url, route, name):
    answer = post(url, route, **{name: [{"id": 0, "scale": 1}]})
    assert answer.status_code == 400, answer.text
    assert name in answer.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"repeat_last_n": 64, "repetition_penalty": 1.2}, "repeat_last_n"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"max_new_tokens": 4}, "max_new_tokens"),
    ],
)
def test_the_field_is_named(url, fields, param):
    error = post(url, "/v1/chat/completions", **fields).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


def test_values_that_ask_for_what_happens_anyway_pass(url):
    fields = {
        "lora": [],
        "adapter": None,
        "mirostat": 0,
        "typical_p": 1.0,
        "repeat_last_n": 64,
        "early_stopping": False,
        "length_penalty": 1,
    }
    answer = post(url, "/v1/chat/completions", **fields)
    assert answer.status_code == 200
    assert len(answer.json()["warnings"]) == len(fields)
    options = {"repeat_last_n": 64, "mirostat": 0, "tfs_z": 1, "repeat_penalty": 1.0}
    assert post(url, "/api/chat", options=options).status_code == 200


def test_no_field_that_is_known_somewhere_is_foreign():
    kinds = [
        each
        for module in (openai, anthropic, ollama, responses)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__name__.endswith("Request")
    ]
    kinds.append(ollama.OllamaOptions)
    known = {name for kind in kinds for name in set(kind.__struct_fields__) - set(_refusable(kind))}
    assert len(kinds) > 8
    assert known & FOREIGN.keys() == {"repeat_last_n"}  # Ollama's option, which is answered by a warning
