"""Adapters over one model by official clients: each gives its own tokens, in one batch and every dialect."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmbox.app.errors import CliError
from llmbox.app.models.adapters import list_adapters
from llmbox.app.models.load_request import ModelRequest
from llmbox.app.security.keys import KeySpec
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.ipc.spawn import Launch
from support.adapters import make_adapter, plain_tensors, write_adapter
from support.openai_server import serving
from support.real_engines import hf_model, hf_tokens
from support.tiny_models import make_tiny_model

PROMPT = "the quick brown fox jumps"
LOST = plain_tensors()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def adapters(directory, tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("pirate", "poet")):
        make_adapter(hf_model(directory), home / name, seed=number, r=4)
    return {name: home / name for name in ("pirate", "poet")}


@pytest.fixture(scope="module")
def expected(directory, adapters, tmp_path_factory) -> dict[str, list[int]]:
    """Tokens of PEFT, and of the base."""
    from peft import PeftModel

    ids = load_model_text(directory).encode(PROMPT)
    found = {"tiny": hf_tokens(hf_model(directory), ids, 12)}
    for name, folder in adapters.items():
        found[name] = hf_tokens(PeftModel.from_pretrained(hf_model(directory), folder).eval(), ids, 12)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory, directory, adapters):
    with serving(tmp_path_factory.mktemp("data"), Launch(), controlled=True) as server:
        server.load(directory, "tiny", device="cpu", dtype="float32", threads=1, memory_bytes=256 << 20)
        server.control.library.registry.adopt_directory("tiny", directory)
        _, server.secret = server.services.security.keys.add(KeySpec(name="owner", scopes=("admin", "infer")))
        for name, folder in adapters.items():
            answer = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))
            assert answer.status_code == 200, answer.text
        yield server


def post(server, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {server.secret}"}
    return httpx.post(server.url + path, json=body, timeout=120, headers=headers)


def test_each_gives_its_own_tokens_in_one_batch(server, expected):
    def ask(name: str) -> list[int]:
        with server.client() as client:
            extra = {"ignore_eos": True, "return_token_ids": True}
            answer = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=extra
            )
            assert answer.model == name
            return answer.choices[0].token_ids

    names = ["pirate", "poet", "tiny"] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(ask, names))
    assert found == [expected[name] for name in names]
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    control, aliases = server.control, server.control.library.registry.read().aliases
    resident = control.services.engines.find("tiny").supervisor.stats.adapters
    assert set(resident) == {aliases[name].adapter for name in ("pirate", "poet")}
    assert control.residency.adapters_used.keys() >= {"pirate", "poet"}


def test_every_dialect_knows_the_names(server):
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answers = [
        post(server, "/v1/chat/completions", model="poet", **chat),
        post(server, "/v1/messages", model="poet", **chat),
        post(server, "/v1/responses", model="poet", input="Hello", max_output_tokens=16),
        post(server, "/api/chat", model="poet", messages=chat["messages"], stream=False),
    ]
    assert [(answer.status_code, answer.json()["model"]) for answer in answers] == [(200, "poet")] * 4


def test_models_names_the_parent(server):
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {
        each["id"]: each.get("parent") for each in listed if each["id"] in {"pirate", "poet", "tiny"}
    } == {
        "pirate": "tiny",
        "poet": "tiny",
        "tiny": None,
    }
    assert 'model_name="poet"' in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"lora_path": "adapters/x"}, 400, "absolute path"),
        ({"lora_path": "/nonexistent"}, 400, "is not a folder"),
        ({"lora_name": "poet"}, 409, "is taken"),
        ({"lora_name": "tiny"}, 409, "is taken"),
        ({"lora_name": "../x"}, 400, "cannot be a model's name"),
        ({"base_model_name": "nobody/nothing"}, 404, "not on this disk"),
        ({}, 400, "has 64 x 64: the adapter is of another base"),
    ],
)
def test_adapters_that_cannot_be_added(server, tmp_path, body, status, told):
    folder = write_adapter(tmp_path / "other", plain_tensors(inputs=32))
    answer = post(server, "/v1/load_lora_adapter", **{"lora_name": "bad", "lora_path": str(folder), **body})
    assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text
    assert answer.json()["error"]["param"] == ("lora_name" if status == 409 else "lora_path")
    assert {each.name for each in list_adapters(server.control.library.registry)} == {"pirate", "poet"}


def test_one_is_removed(server, tmp_path, adapters):
    registry = server.control.library.registry
    body = {"lora_name": "short-lived", "lora_path": str(adapters["poet"])}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body).status_code == 401
    assert post(server, "/v1/load_lora_adapter", **body).status_code == 200
    assert post(server, "/v1/unload_lora_adapter", lora_name="short-lived").status_code == 200
    assert post(server, "/v1/unload_lora_adapter", lora_name="short-lived").status_code == 404
    gone = post(server, "/v1/completions", model="short-lived", prompt="x")
    assert gone.status_code == 404
    # The other name of the same files still has them.
    assert post(server, "/v1/completions", model="poet", prompt="x", max_tokens=1).status_code == 200
    assert len(list(registry.adapters_home.iterdir())) == 2


def test_a_model_cannot_take_the_name_of_an_adapter(server):
    """It would answer in its place."""
    control = server.control
    with pytest.raises(CliError, match="pirate is an adapter"):
        control.begin_load(ModelRequest(control.resolve("tiny"), alias="pirate"))


def test_an_adapter_whose_files_are_gone_is_told_without_paths(server, adapters):
    body = {"lora_name": "lost", "lora_path": str(write_adapter(adapters["poet"].parent / "lost", LOST))}
    assert post(server, "/v1/load_lora_adapter", **body).status_code == 200
    registry = server.control.library.registry
    shutil.rmtree(registry.adapters_home / registry.read().aliases["lost"].adapter)
    answer = post(server, "/v1/completions", model="lost", prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "was removed while the request waited" in answer.text
    assert str(registry.adapters_home) not in answer.text
    assert post(server, "/v1/unload_lora_adapter", lora_name="lost").status_code == 200


def test_an_adapter_whose_base_is_gone_is_told_without_paths(server, tmp_path):
    registry = server.control.library.registry
    alias = registry.read().aliases["pirate"]
    registry.change(
        lambda names: replace(
            names, aliases=names.aliases | {"orphan": replace(alias, model=str(tmp_path / "gone"))}
        )
    )
    answer = post(server, "/v1/completions", model="orphan", prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "base of the adapter 'orphan' is not on this machine" in answer.text
    assert str(tmp_path) not in answer.text
    assert post(server, "/v1/unload_lora_adapter", lora_name="orphan").status_code == 200
