"""Embeddings over HTTP, by the official client, from an engine whose vectors are known."""

import base64
import json
import math
import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmbox.app.store.record import RecordFilter, RequestRecord
from llmbox.app.text.tokenizer.text_loader import load_model_text
from support.cli_box import PATIENCE, until
from support.deferred_module import DeferredModule
from support.fake_engine import GO_FILE, fake_vector, write_model
from support.openai_server import serving
from support.tokenizers_zoo import byte_level, llama2, write_text_files

openai = DeferredModule("openai")

CONTEXT = 64
ROUTE = "/v1/embeddings"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    options = {"vocab_size": tokenizer.get_vocab_size(), "context": CONTEXT, "max_running": 4}
    write_model(write_text_files(root / "one", tokenizer), **options)
    write_model(write_text_files(root / "pooler", tokenizer), **options, generates=False, pooling="last")
    write_model(write_text_files(root / "dense", tokenizer), **options, pooling_problem="it asks for Dense")
    other = llama2()
    write_model(write_text_files(root / "spm", other), **{**options, "vocab_size": other.get_vocab_size()})
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory, models):
    with serving(tmp_path_factory.mktemp("data")) as server:
        for name in ("one", "pooler", "dense", "spm"):
            server.load(models / name, name)
        yield server


@pytest.fixture(scope="module")
def text(models):
    return load_model_text(models / "one")


def expected(ids, dimensions=8) -> list[float]:
    numbers = struct.unpack("<8f", fake_vector(ids))[:dimensions]
    length = math.hypot(*numbers)
    return pytest.approx([number / length for number in numbers])


def post(http, **fields) -> dict:
    answer = http.post(ROUTE, json={"model": "one", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def error(http, route=ROUTE, status=400, **fields) -> dict:
    answer = http.post(route, json={"model": "one", **fields})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_the_client_reads_what_it_asks_for_by_default(client, text):
    """It asks for base64 and decodes that by itself."""
    answer = client.embeddings.create(model="one", input="hello world", user="somebody")
    ids = text.encode("hello world")
    (one,) = answer.data
    assert one.embedding == expected(ids)
    assert (answer.object, one.object, one.index, answer.model) == ("list", "embedding", 0, "one")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(ids), len(ids))


@pytest.mark.parametrize("encoding", ["float", "base64", "omit"])
def test_every_kind_of_input_in_its_order(client, text, encoding):
    texts = ["hello", "a longer text than that", "hello"]
    lists = [text.encode(each) for each in texts]
    for given, wanted in ((texts, lists), (lists, lists), (lists[1], lists[1:2])):
        answer = client.embeddings.create(
            model="one", input=given, encoding_format=openai.omit if encoding == "omit" else encoding
        )
        assert [each.index for each in answer.data] == list(range(len(wanted)))
        told = [_decoded(each.embedding) for each in answer.data]
        assert told == [expected(ids) for ids in wanted]
        assert answer.usage.prompt_tokens == sum(map(len, wanted))


def _decoded(embedding) -> list[float]:
    if isinstance(embedding, str):
        return list(struct.unpack("<8f", base64.b64decode(embedding)))
    return embedding


def test_floats_and_base64_are_the_same_numbers(http):
    floats = post(http, input="hello")["data"][0]["embedding"]
    coded = post(http, input="hello", encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack("<8f", base64.b64decode(coded))) == floats
    assert math.hypot(*floats) == pytest.approx(1)


def test_special_tokens_of_the_tokenizer(http, models):
    text = load_model_text(models / "spm")
    ids = text.encode("hello")
    assert ids != text.encode("hello", add_special_tokens=False)
    told = post(http, model="spm", input="hello")
    assert told["data"][0]["embedding"] == expected(ids)
    plain = post(http, model="spm", input="hello", add_special_tokens=False)
    assert plain["data"][0]["embedding"] == expected(ids[1:])
    as_given = post(http, model="spm", input=ids[1:])
    assert as_given["data"][0]["embedding"] == expected(ids[1:])


def test_fewer_dimensions_have_length_one_again(client, text):
    answer = client.embeddings.create(model="one", input="hello", dimensions=3)
    vector = answer.data[0].embedding
    assert vector == expected(text.encode("hello"), 3)
    assert math.hypot(*vector) == pytest.approx(1)


def test_more_inputs_than_run_at_once(client, text):
    """Also more than the engine is given at a time."""
    texts = [f"text {number}" for number in range(300)]
    answer = client.embeddings.create(model="one", input=texts)
    assert [each.embedding for each in answer.data] == [expected(text.encode(each)) for each in texts]
    assert answer.usage.prompt_tokens == sum(len(text.encode(each)) for each in texts)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [[1], [10**6]]}, "input[1]"),
        ({"input": [-1]}, "input[...]"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "3"}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
def test_bad_requests_are_named(http, fields, param):
    told = error(http, **fields)["param"]
    assert told == param or (param == "input[...]" and told.startswith("input"))


def test_what_fills_the_context_and_what_does_not_fit(http):
    assert post(http, input=[5] * CONTEXT)["usage"]["prompt_tokens"] == CONTEXT
    told = error(http, input=[[5], [5] * (CONTEXT + 1)])
    assert (told["code"], told["param"]) == ("context_length_exceeded", "input")
    assert str(CONTEXT) in told["message"]
    assert str(CONTEXT + 1) in told["message"]


def test_unknown_fields_are_warnings(http):
    assert post(http, input="a", imput="b")["warnings"] == ["Unknown field 'imput' was ignored."]
    assert "warnings" not in post(http, input="a")


def test_a_model_for_vectors_makes_no_text(http):
    assert post(http, model="pooler", input="a")["data"]
    asked = {"model": "pooler", "prompt": "a"}
    assert error(http, "/v1/completions", **asked)["code"] == "generation_not_supported"


def test_a_declaration_that_cannot_be_followed_is_said(http):
    told = error(http, model="dense", input="a")
    assert told["code"] == "embeddings_not_supported"
    assert "Dense" in told["message"]


def test_an_unknown_model(http):
    assert error(http, status=404, model="nobody", input="a")["code"] == "model_not_found"


def test_the_log_says_what_it_was(http, server):
    """One row a request, whatever the number of texts; no seed, as nothing was drawn."""
    answer = http.post(ROUTE, json={"model": "pooler", "input": ["a"] * 20})
    row = logged(server, answer.headers["x-request-id"])
    assert (row.endpoint, row.http_status, row.finish_reasons, row.seed) == (ROUTE, 200, "stop", None)
    assert (row.prompt_tokens, row.output_tokens) == (20, 0)
    assert json.loads(row.params) == {"pooling": "last"}


def logged(server, exchange: str) -> RequestRecord:
    log = server.services.request_log
    log.flush()
    rows = server.call(log.query(RecordFilter(limit=5)))
    return next(row for _, row in rows if exchange.removeprefix("req_") in row.id)


def test_an_engine_may_die_meanwhile(http, server, models, text):
    """The answer waits for the next one, and is the same."""
    directory = models / "held"
    options = {"vocab_size": text.vocab_size, "context": CONTEXT, "max_running": 2, "hold_at": 0}
    write_model(write_text_files(directory, byte_level()), **options)
    server.load(directory, "held")
    supervisor = server.services.engines.find("held").supervisor
    texts = [f"text {number}" for number in range(9)]
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(http.post, ROUTE, json={"model": "held", "input": texts})
        until(lambda: supervisor.open_requests == 4)
        os.kill(supervisor.pid, signal.SIGKILL)
        until(lambda: supervisor.restarts == 1 and supervisor.state == "ready")
        (directory / GO_FILE).touch()
        answer = waiting.result(PATIENCE)
    assert [each["embedding"] for each in answer.json()["data"]] == [
        expected(text.encode(each)) for each in texts
    ]
    assert logged(server, answer.headers["x-request-id"]).resumes == 1
