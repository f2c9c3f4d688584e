"""Embeddings of Ollama's API, by its own client, from an engine whose vectors are known."""

import math
import struct

import ollama
import pytest
from tokenizers import Tokenizer, processors

from llmbox.app.text.tokenizer.text_loader import load_model_text
from support.cli_box import PATIENCE
from support.fake_engine import fake_vector, write_model
from support.openai_server import serving
from support.tokenizers_zoo import byte_level, drawn_ids, write_text_files

CONTEXT = 12
END = "<|im_end|>"
LONG = "the quick brown fox jumps over the lazy dog, " * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Its tokenizer ends each text with a token."""
    directory, tokenizer = tmp_path_factory.mktemp("models") / "one", byte_level()
    write_model(write_text_files(directory, tokenizer), **drawn_ids(tokenizer), context=CONTEXT)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=None, special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory, directory):
    with serving(tmp_path_factory.mktemp("data"), controlled=True) as server:
        server.load(directory, "one")
        yield server


@pytest.fixture(scope="module")
def client(server):
    return ollama.Client(server.url, timeout=PATIENCE)


@pytest.fixture(scope="module")
def text(directory):
    return load_model_text(directory)


def expected(ids, dimensions=8):
    numbers = struct.unpack("<8f", fake_vector(ids))[:dimensions]
    length = math.hypot(*numbers)
    return pytest.approx([number / length for number in numbers])


def test_texts_in_their_order(client, text):
    texts = ["hello", "world", "hello"]
    told = client.embed("one:latest", texts)
    assert [list(each) for each in told.embeddings] == [expected(text.encode(each)) for each in texts]
    assert (told.model, told.prompt_eval_count) == ("one:latest", sum(len(text.encode(t)) for t in texts))
    assert told.total_duration > 0
    (one,) = client.embed("one", "hello", dimensions=3).embeddings
    assert list(one) == expected(text.encode("hello"), 3)


def test_the_older_route(client, text):
    assert list(client.embeddings("one", "hello").embedding) == expected(text.encode("hello"))
    assert list(client.embeddings("one", "").embedding) == []


def test_nothing_to_embed_loads_the_model(client, http):
    assert list(client.embed("one", "").embeddings) == []
    assert list(client.embed("one", []).embeddings) == []
    assert http.post("/api/embed", json={"model": "one"}).json()["embeddings"] == []


@pytest.mark.parametrize("truncate", [None, False])
def test_a_long_text_is_refused_unless_it_may_be_cut(client, text, truncate):
    with pytest.raises(ollama.ResponseError) as refused:
        client.embed("one", ["hello", LONG], truncate=truncate)
    assert refused.value.status_code == 400
    for number in (CONTEXT, len(text.encode(LONG))):
        assert str(number) in refused.value.error


def test_a_cut_is_asked_for_and_told(http, text):
    whole = text.encode(LONG)
    cut = [*whole[: CONTEXT - 1], whole[-1]]
    asked = {"model": "one", "input": ["hello", LONG], "truncate": True}
    told = http.post("/api/embed", json=asked).json()
    assert told["embeddings"] == [expected(text.encode("hello")), expected(cut)]
    (warning,) = told["warnings"]
    assert "input[1]" in warning
    assert str(len(whole)) in warning
    assert "warnings" not in http.post("/api/embed", json=asked | {"input": "hello"}).json()


def test_what_has_no_effect_is_said(http):
    asked = {"model": "one", "input": "hello", "options": {"num_ctx": 8, "seed": None}, "more": 1}
    assert len(http.post("/api/embed", json=asked).json()["warnings"]) == 2
    quiet = {"model": "one", "input": "hello", "options": {"seed": None}}
    assert "warnings" not in http.post("/api/embed", json=quiet).json()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"input": ["a", ""]}, 400),
        ({"input": 3}, 400),
        ({"input": [3]}, 400),
        ({"input": "a", "dimensions": 9}, 400),
        ({"input": "a", "keep_alive": "soon"}, 400),
        ({"input": "a", "model": "nobody"}, 404),
    ],
    ids=str,
)
def test_bad_requests(http, fields, status):
    answer = http.post("/api/embed", json={"model": "one", **fields})
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
