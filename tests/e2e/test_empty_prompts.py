"""A prompt without tokens is a 400 in every dialect; names that the template owns are not for requests."""

import httpx
import pytest
from tokenizers import normalizers

from support.cli_box import PATIENCE
from support.fake_engine import write_model
from support.openai_server import serving
from support.tokenizers_zoo import LLAMA3, byte_level, write_text_files

BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
BLANK = [{"role": "user", "content": " \n "}]
WORDS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Strip()
    options = {"vocab_size": tokenizer.get_vocab_size(), "context": 256}
    write_model(write_text_files(root / "bare", tokenizer, BARE), **options)
    write_model(
        write_text_files(root / "llama", tokenizer, LLAMA3, image_token="<unk>"),
        **options,
    )
    write_model(write_text_files(root / "short", tokenizer, BARE), context=256, vocab_size=300)
    with serving(tmp_path_factory.mktemp("data"), controlled=True) as server:
        for name in ("bare", "llama", "short"):
            server.load(root / name, name)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            yield http
            for model in server.services.engines.models():
                assert (model.supervisor.state, model.supervisor.restarts) == ("ready", 0)


ASKED = {
    "chat": ("/v1/chat/completions", {"messages": BLANK}, "messages"),
    "chat_stream": ("/v1/chat/completions", {"messages": BLANK, "stream": True}, "messages"),
    "completions": ("/v1/completions", {"prompt": "  "}, "prompt"),
    "completions_second": ("/v1/completions", {"prompt": ["x", " "]}, "prompt[1]"),
    "responses": ("/v1/responses", {"input": "  "}, "input"),
    "responses_stream": ("/v1/responses", {"input": "  ", "stream": True}, "input"),
    "embeddings": ("/v1/embeddings", {"input": " "}, "input"),
    "anthropic": ("/v1/messages", {"messages": BLANK, "max_tokens": 4}, "messages"),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": BLANK}, "messages"),
    "ollama_chat": ("/api/chat", {"messages": BLANK}, "messages"),
    "ollama_generate": ("/api/generate", {"prompt": " "}, "prompt"),
    "ollama_embed": ("/api/embed", {"input": " "}, "input"),
    "ollama_embeddings": ("/api/embeddings", {"prompt": " "}, "prompt"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_prompt_of_no_tokens_is_refused_by_name(http, case):
    path, fields, param = ASKED[case]
    answer = http.post(path, json={"model": "bare", **fields})
    assert answer.status_code == 400, answer.text
    assert "no tokens" in answer.text
    assert f"'{param}'" in answer.text


def test_tokenizing_nothing_is_no_error(http):
    answer = http.post("/tokenize", json={"model": "bare", "messages": BLANK})
    assert (answer.status_code, answer.json()["count"]) == (200, 0)


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "bos_token",
        "eos_token",
        "add_generation_prompt",
        "raise_exception",
        "image_token",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_request_cannot_set_what_the_template_relies_on(http, path, name):
    answer = http.post(path, json={"model": "llama", "messages": WORDS, "chat_template_kwargs": {name: ""}})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert name in answer.json()["error"]["message"]


def test_other_names_go_to_the_template(http):
    fields = {"model": "llama", "messages": WORDS, "max_tokens": 2, "chat_template_kwargs": {"mood": "glad"}}
    assert http.post("/v1/chat/completions", json=fields).status_code == 200


def test_a_token_without_an_embedding_is_refused_by_name(http):
    """The tokenizer of this model has more ids than the model."""
    fields = {"model": "short", "max_tokens": 2, "messages": [{"role": "assistant", "content": "<think>"}]}
    answer = http.post("/v1/chat/completions", json={**fields, "add_generation_prompt": True})
    assert answer.status_code == 400, answer.text
    assert "not in the vocabulary of 300" in answer.json()["error"]["message"]
