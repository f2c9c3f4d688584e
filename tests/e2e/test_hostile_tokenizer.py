"""A tokenizer that explodes, backtracks or panics is an error of that request, in every dialect."""

import httpx
import pytest

from llmbox.app.text.tokenizer import sandboxed_encoder
from support.cli_box import PATIENCE
from support.fake_engine import write_model
from support.hostile_tokenizers import BACKTRACKING, PANICKING, doubling
from support.openai_server import serving
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files

FILES = {"doubling": doubling(20), "backtracking": BACKTRACKING, "panicking": PANICKING}
TEXTS = {"doubling": "Z" * 16, "backtracking": "a" * 4000 + "b", "panicking": "a" * 2000 + "b"}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    root, data, tokenizer = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("data"), byte_level()
    with pytest.MonkeyPatch.context() as patch, serving(data, controlled=True) as server:
        patch.setattr(sandboxed_encoder, "CPU_SECONDS", 0.5)
        for name, source in FILES.items():
            folder = write_text_files(root / name, tokenizer, CHATML)
            (folder / "tokenizer.json").write_bytes(source)
            write_model(folder, **drawn_ids(tokenizer))
            server.load(folder, name)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            yield http


def bodies(name: str, text: str) -> list[tuple[str, dict]]:
    said = [{"role": "user", "content": text}]
    hello = [{"role": "user", "content": "hello"}]
    return [
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/chat/completions", {"messages": said, "stream": True}),
        ("/v1/chat/completions", {"messages": hello, "bad_words": [text]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["hello", text]}),
        ("/v1/embeddings", {"input": text}),
        ("/v1/responses", {"input": text}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": said}),
        ("/v1/messages", {"messages": said, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": said}),
        ("/api/embed", {"input": text}),
        ("/api/generate", {"prompt": text}),
    ]


@pytest.mark.parametrize("name", FILES)
def test_it_is_a_400_and_the_model_serves_on(http, name):
    """Each route with one of them; two routes with those that take processor time until they are stopped."""
    routes = bodies(name, TEXTS[name])
    for path, body in routes if name == "backtracking" else routes[1:3]:
        answer = http.post(path, json={"model": name, **body})
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith("The model's tokenizer could not read this text"), path
        assert http.get("/health").status_code == 200
    chat = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
