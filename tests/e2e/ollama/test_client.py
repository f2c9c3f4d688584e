"""Ollama's own Python client, against a running app whose hub is on loopback."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import ollama
import pytest

from llmbox.app.config.model_settings import MemorySettings
from llmbox.app.config.settings import Settings
from llmbox.app.hub.download_queue import Downloads
from llmbox.app.security.keys import KeySpec
from support.cli_box import PATIENCE, until
from support.hub_models import model_files
from support.hub_stub import StubHub, StubRepo, stub_hub
from support.openai_server import Server, serving
from support.tokenizers_zoo import CHATML

NAME, OTHER, GATED = "org/little", "org/other", "org/gated"
THINKING = CHATML + "{#- <think></think> enable_thinking tools <tool_call> -#}"
WORDS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def hub() -> Iterator[StubHub]:
    files = model_files() | {"chat_template.jinja": THINKING.encode()}
    files["generation_config.json"] = b'{"temperature": 0.6, "repetition_penalty": 1.1}'
    with stub_hub() as stub:
        stub.repos |= {
            NAME: StubRepo(files),
            OTHER: StubRepo(model_files(1)),
            GATED: StubRepo(model_files(2), gated=True),
        }
        yield stub


@pytest.fixture(scope="module")
def server(hub: StubHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        assert os.environ["HF_ENDPOINT"] == hub.url
        settings = Settings(memory=MemorySettings(spare_engine=False))
        with serving(tmp_path_factory.mktemp("data"), controlled=True, settings=settings) as server:
            yield server


def key(server: Server, name: str, **fields: Any) -> str:
    _, secret = server.services.security.keys.add(KeySpec(name=name, **fields))
    return secret


def client_of(server: Server, secret: str = "none") -> ollama.Client:
    return ollama.Client(server.url, headers={"Authorization": f"Bearer {secret}"}, timeout=PATIENCE)


@pytest.fixture(scope="module")
def anybody(server: Server) -> ollama.Client:
    return client_of(server)


@pytest.fixture(scope="module")
def owner(server: Server) -> ollama.Client:
    return client_of(server, key(server, "owner", scopes=("admin",)))


@pytest.fixture
def pulled(server: Server, owner: ollama.Client) -> Iterator[None]:
    """On disk, and in nobody's memory before and after."""
    owner.pull(NAME)
    yield
    for model in owner.ps().models:
        owner.generate(model.model, keep_alive=0)
    until(lambda: not owner.ps().models)


def downloads(server: Server) -> Downloads:
    assert server.control is not None
    return server.control.library.downloads


def names(found: Any) -> set[str]:
    return {model.model for model in found.models}


def test_a_model_is_pulled_seen_asked_and_deleted(owner: ollama.Client, anybody: ollama.Client) -> None:
    steps = list(owner.pull(f"hf.co/{OTHER}:latest", stream=True))
    assert steps[0].status == "pulling manifest"
    assert steps[-1].status == "success"
    layers = [step for step in steps if step.digest is not None]
    assert len({step.digest for step in layers}) == 2, "weights and the tokenizer"
    assert all(step.digest.startswith("sha256:") and step.status.startswith("pulling ") for step in layers)
    last = {step.digest: step for step in layers}
    assert all(step.completed == step.total for step in last.values())
    assert OTHER in names(anybody.list())
    told = anybody.chat(OTHER, WORDS, options={"num_predict": 3}, keep_alive=-1)
    assert told.eval_count == 3
    with pytest.raises(ollama.ResponseError, match="llmbox unload") as refused:
        owner.delete(OTHER)
    assert refused.value.status_code == 409
    anybody.generate(OTHER, keep_alive=0)
    assert owner.delete(OTHER).status == "success"
    assert OTHER not in names(anybody.list())
    with pytest.raises(ollama.ResponseError) as refused:
        owner.delete(OTHER)
    assert refused.value.status_code == 404


def test_what_is_there_already_is_a_success(pulled: None, owner: ollama.Client) -> None:
    assert owner.pull(NAME).status == "success"
    assert [step.status for step in owner.pull("builtin:latest", stream=True)] == ["success"]


def test_facts_of_a_model_on_disk_and_in_memory(pulled: None, anybody: ollama.Client) -> None:
    listed = next(model for model in anybody.list().models if model.model == NAME)
    assert (listed.details.format, listed.details.family) == ("safetensors", "llama")
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("0.1M", "BF16")
    assert listed.size > 100_000
    assert len(listed.digest) == 64
    shown = anybody.show(f"{NAME}:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == THINKING
    assert shown.parameters.split() == ["num_ctx", "256", "temperature", "0.6", "repeat_penalty", "1.1"]
    facts = shown.modelinfo
    assert facts["general.architecture"] == "llama"
    assert facts["llama.context_length"] == 256
    assert (facts["llama.block_count"], facts["llama.attention.head_count_kv"]) == (2, 2)
    assert shown.modified_at == listed.modified_at
    assert anybody.ps().models == []
    anybody.generate(NAME)
    (running,) = anybody.ps().models
    assert (running.model, running.digest, running.size_vram) == (NAME, listed.digest, 0)
    assert running.size > 0
    assert running.context_length == 4096, "as the fake engine says"
    assert anybody.show(NAME).modelinfo["llama.context_length"] == 4096


def test_how_long_a_model_stays(pulled: None, anybody: ollama.Client) -> None:
    def left() -> timedelta:
        (model,) = anybody.ps().models
        return model.expires_at - datetime.now(UTC)

    told = anybody.chat(NAME, keep_alive="1h30m")
    assert told.done_reason == "load"
    assert timedelta(minutes=80) < left() <= timedelta(minutes=90)
    assert "warnings" not in told
    anybody.generate(NAME, "hello", options={"num_predict": 1}, keep_alive=1200)
    assert timedelta(minutes=10) < left() <= timedelta(minutes=20)
    anybody.generate(NAME, "hello", options={"num_predict": 1})
    assert timedelta(minutes=10) < left() <= timedelta(minutes=20), "unsaid: as it was"
    anybody.generate(NAME, keep_alive="-1m")
    assert left() > timedelta(days=36_500)
    assert anybody.chat(NAME, keep_alive=0).done_reason == "unload"
    assert anybody.ps().models == []
    assert anybody.chat(NAME, keep_alive="0s").done_reason == "unload", "nothing to be done"


def test_no_time_at_all_is_after_the_answer(pulled: None, anybody: ollama.Client) -> None:
    told = anybody.chat(NAME, WORDS, options={"num_predict": 3}, keep_alive=0)
    assert told.eval_count == 3
    until(lambda: not anybody.ps().models)


def test_what_the_owner_loaded_is_the_owners(
    server: Server, pulled: None, owner: ollama.Client, anybody: ollama.Client
) -> None:
    secret = owner._client.headers["authorization"]
    with httpx.Client(base_url=server.url, headers={"Authorization": secret}, timeout=PATIENCE) as http:
        loaded = http.post("/v1/load", json={"model": NAME, "ttl": 3600, "options": {"ctx": 64}})
        assert loaded.status_code == 200, loaded.text
        assert (loaded.json()["id"], loaded.json()["state"]) == (NAME, "loaded")
        asked = {"model": NAME, "prompt": "x", "options": {"num_predict": 1}, "stream": False}
        told = anybody._client.post("/api/generate", json={**asked, "keep_alive": -1}).json()
        assert "loaded by the owner" in told["warnings"][0]
        (model,) = anybody.ps().models
        assert model.expires_at - datetime.now(UTC) <= timedelta(hours=1)
        with pytest.raises(ollama.ResponseError, match="scope admin") as refused:
            anybody.generate(NAME, keep_alive=0)
        assert refused.value.status_code == 403
        server.services.engines.find(NAME).pinned = True
        with pytest.raises(ollama.ResponseError, match="llmbox unpin") as refused:
            owner.generate(NAME, keep_alive=0)
        assert refused.value.status_code == 409
        server.services.engines.find(NAME).pinned = False
        assert http.post("/v1/unload", json={"model": NAME}).json() == {"unloaded": [NAME]}
        assert anybody.ps().models == []
        again = http.post("/v1/unload", json={"model": NAME})
        assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "org/absent"}, 404, "model_not_found"),
        ({"model": "two words"}, 404, "model_not_found"),
        ({"model": NAME, "options": {"ctx": "x"}}, 400, "invalid_value"),
        ({"model": NAME, "surprise": 1}, 400, "invalid_value"),
        ({}, 400, "missing_required_parameter"),
    ],
)
def test_loads_that_cannot_be(
    server: Server, pulled: None, owner: ollama.Client, body: dict[str, Any], status: int, code: str
) -> None:
    headers = {"Authorization": owner._client.headers["authorization"]}
    answer = httpx.post(f"{server.url}/v1/load", json=body, headers=headers, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


@pytest.mark.parametrize(
    ("name", "status", "word"),
    [
        ("nonesuch", 400, "org/name"),
        ("org/absent", 404, "llmbox search"),
        (GATED, 403, "terms"),
        (f"{NAME}:Q4_K_M", 404, "has no quantization Q4_K_M"),
        ("../etc", 400, "org/name"),
    ],
)
def test_pulls_that_cannot_be(owner: ollama.Client, name: str, status: int, word: str) -> None:
    with pytest.raises(ollama.ResponseError, match=word) as refused:
        owner.pull(name)
    assert refused.value.status_code == status
    with pytest.raises(ollama.ResponseError, match=word):
        list(owner.pull(name, stream=True))


def test_deletes_that_cannot_be(owner: ollama.Client) -> None:
    for name, status in [("builtin", 403), ("nobody", 404), ("org/absent", 404)]:
        with pytest.raises(ollama.ResponseError) as refused:
            owner.delete(name)
        assert refused.value.status_code == status, name


def test_changing_the_box_needs_the_scope(server: Server, pulled: None, anybody: ollama.Client) -> None:
    user = client_of(server, key(server, "user", models=("org/*",)))
    reader = client_of(server, key(server, "reader", scopes=("read",)))
    changes = [("POST", "/api/pull"), ("DELETE", "/api/delete"), ("POST", "/v1/load"), ("POST", "/v1/unload")]
    for client, status in [(anybody, 401), (user, 403), (reader, 403)]:
        for method, path in changes:
            answer = client._client.request(method, path, json={"model": NAME})
            assert answer.status_code == status, path
            told = answer.json()["error"]
            assert isinstance(told, str) if path.startswith("/api/") else "admin" in told["message"]
    assert NAME in names(anybody.list())


def test_a_key_sees_its_models_alone(server: Server, pulled: None, anybody: ollama.Client) -> None:
    user = client_of(server, key(server, "one", models=("org/*",)))
    admin = client_of(server, key(server, "some", models=("org/*",), scopes=("admin",)))
    anybody.generate("builtin", keep_alive=60)
    anybody.generate(NAME, keep_alive=60)
    assert names(anybody.ps()) == {"builtin", NAME}
    assert names(user.list()) == names(user.ps()) == {NAME}
    assert user.show(NAME).capabilities
    for call in (
        lambda: user.show("builtin"),
        lambda: user.generate("builtin", keep_alive=0),
        lambda: admin.pull("other/model"),
        lambda: admin.delete("other/model"),
    ):
        with pytest.raises(ollama.ResponseError, match="may not use the model") as refused:
            call()
        assert refused.value.status_code == 403


def test_what_is_not_done_says_what_to_use_instead(owner: ollama.Client) -> None:
    for call, word in [
        (lambda: owner.push(NAME), "Hugging Face"),
        (lambda: owner.create_blob(__file__), "llmbox adopt"),
    ]:
        with pytest.raises(ollama.ResponseError, match=word) as refused:
            call()
        assert refused.value.status_code == 400


def test_a_copy_is_another_name_that_can_be_deleted(pulled: None, owner: ollama.Client) -> None:
    assert owner.copy(NAME, "mine:latest").status == "success"
    owner.copy("mine", "yours")
    assert {"mine", "yours", NAME} <= names(owner.list())
    assert owner.generate("yours", "hello", options={"num_predict": 2, "seed": 1}).eval_count == 2
    for name in ("mine", "yours"):
        assert owner.delete(name).status == "success"
    assert not {"mine", "yours"} & names(owner.list())
    assert NAME in names(owner.list())
    for source, destination, status in (("org/absent", "x", 404), (NAME, "builtin", 409), (NAME, "a b", 400)):
        with pytest.raises(ollama.ResponseError) as refused:
            owner.copy(source, destination)
        assert refused.value.status_code == status
    nobody = ollama.Client(str(owner._client.base_url))
    with pytest.raises(ollama.ResponseError, match="admin"):
        nobody.copy(NAME, "x")


@pytest.mark.parametrize(
    ("method", "path", "body", "word"),
    [
        ("POST", "/api/show", {}, "model"),
        ("POST", "/api/show", {"name": "org/absent"}, "org/absent"),
        ("POST", "/api/show", {"model": 1}, "model"),
        ("POST", "/api/pull", {"model": "a/b", "stream": "no"}, "stream"),
        ("DELETE", "/api/delete", {"model": ""}, "model"),
        ("POST", "/api/chat", {"model": "builtin", "keep_alive": "soon"}, "keep_alive"),
        ("POST", "/api/generate", {"model": "builtin", "keep_alive": "5 m"}, "keep_alive"),
        ("POST", "/api/generate", {"model": "builtin", "keep_alive": True}, "keep_alive"),
        ("GET", "/api/nope", None, "route"),
        ("POST", "/api/generate", {"model": "org/absent", "keep_alive": 0}, "org/absent"),
    ],
)
def test_mistakes_are_told_in_ollamas_shape(
    owner: ollama.Client, method: str, path: str, body: Any, word: str
) -> None:
    answer = owner._client.request(method, path, json=body)
    assert answer.status_code in {400, 404}
    assert list(answer.json()) == ["error"]
    assert word in answer.json()["error"]


def test_a_download_goes_on_without_its_client_and_can_be_cancelled(
    server: Server, hub: StubHub, owner: ollama.Client
) -> None:
    hub.repos["org/held"] = StubRepo(model_files(3))
    hub.hold_after = 16_384
    try:
        steps = iter(owner.pull("org/held", stream=True))
        assert next(steps).status == "pulling manifest"
        assert next(step for step in steps if step.digest is not None).total > 16_384
        steps.close()  # the client is gone
        (download,) = [d for d in downloads(server).all() if d.model == "org/held"]
        again = iter(owner.pull("org/held", stream=True))
        next(again)
        assert download.state == "downloading"
        server.call(downloads(server).cancel("org/held"))
        with pytest.raises(ollama.ResponseError, match="was cancelled"):
            list(again)
    finally:
        hub.hold_after = None
        hub.go_on.set()
    assert owner.pull("org/held").status == "success"
    assert owner.delete("org/held").status == "success"
