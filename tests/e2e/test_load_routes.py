"""/v1/load and /v1/unload while a model is on its way, with the fake engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmbox.app.errors import ApiError
from llmbox.app.models.registry import Registry
from llmbox.app.security.keys import KeySpec
from support.cli_box import PATIENCE
from support.engines import until
from support.fake_engine import write_model
from support.openai_server import Server, serving
from support.tokenizers_zoo import byte_level, write_text_files


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("data"), controlled=True) as server:
        yield server


@pytest.fixture(scope="module")
def headers(server: Server) -> dict[str, str]:
    _, secret = server.services.security.keys.add(KeySpec(name="owner", scopes=("admin",)))
    return {"Authorization": f"Bearer {secret}"}


def model(folder: Path, name: str, **options: Any) -> str:
    write_text_files(folder / name, byte_level())
    return str(write_model(folder / name, **options))


def names(server: Server) -> list[str]:
    return [each.name for each in server.services.engines.models()]


async def test_a_load_goes_on_without_whoever_asked(
    server: Server, headers: dict[str, str], tmp_path: Path
) -> None:
    path = model(tmp_path, "slow", load_delay=0.3)
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=PATIENCE) as http:
        asking = asyncio.create_task(http.post("/v1/load", json={"model": path}))
        await until(lambda: server.services.engines.loading() or "slow" in names(server))
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: "slow" in names(server))
        again = await http.post("/v1/load", json={"model": path})
        assert (again.status_code, again.json()["id"], again.json()["context_window"]) == (200, "slow", 4096)
        other = await http.post("/v1/load", json={"model": path, "options": {"ctx": 64}})
        assert other.status_code == 409
        assert (await http.post("/v1/unload", json={"model": "slow"})).json() == {"unloaded": ["slow"]}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_while_its_model_loads_is_dropped_and_the_load_goes_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    name = f"asked-{streams}".lower()
    path = Path(model(tmp_path, name, load_delay=0.3))
    Registry(server.services.paths.registry_file).adopt_directory(name, path)
    _, secret = server.services.security.keys.add(KeySpec(name=name, scopes=("infer",)))
    dropped: list[ApiError] = []

    def record(_id: str, _endpoint: str, _model: str, error: ApiError, **_: Any) -> None:
        dropped.append(error)

    monkeypatch.setattr(server.services.gateway, "record_refusal", record)
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=PATIENCE) as http:
        body = {"model": name, "prompt": "x", "stream": streams}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(server.services.engines.loading)
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: dropped)
    assert [(error.status, error.code) for error in dropped] == [(499, "client_disconnected")]
    await until(lambda: name in names(server))
    loaded = server.services.engines.find(name)
    assert loaded is not None
    assert loaded.supervisor.stats.steps == loaded.supervisor.open_requests == 0
    server.call(server.services.engines.unload(name))


async def test_who_waits_is_told_that_it_was_unloaded(
    server: Server, headers: dict[str, str], tmp_path: Path
) -> None:
    path = model(tmp_path, "never", load_delay=PATIENCE)
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=PATIENCE) as http:
        asking = asyncio.create_task(http.post("/v1/load", json={"model": path}))
        await until(server.services.engines.loading)
        assert (await http.post("/v1/unload", json={"model": "never"})).json() == {"unloaded": ["never"]}
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_unloaded")
    assert names(server) == []


def test_a_failed_load_says_why_without_the_path(
    server: Server, headers: dict[str, str], tmp_path: Path
) -> None:
    text = f"{tmp_path / 'broken'}/config.json is not valid JSON"
    path = model(tmp_path, "broken", load_error=("bad_model", text))
    answer = httpx.post(f"{server.url}/v1/load", json={"model": path}, headers=headers, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_model")
    assert answer.json()["error"]["message"] == "config.json is not valid JSON"
    assert server.services.engines.failures()
    cleared = httpx.post(f"{server.url}/v1/unload", json={"model": "broken"}, headers=headers)
    assert cleared.status_code == 200
    assert not server.services.engines.failures()


def test_where_there_is_no_room_now_it_says_when_to_ask_again(
    server: Server, headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = ApiError(503, "others are busy", "memory_busy", type="server_error", headers={"Retry-After": "5"})

    def no_room(*_: Any, **__: Any) -> "asyncio.Future[Any]":
        refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        refused.set_exception(busy)
        return refused

    monkeypatch.setattr(server.services.engines, "begin_load", no_room)
    body = {"model": model(tmp_path, "third")}
    answer = httpx.post(f"{server.url}/v1/load", json=body, headers=headers, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "memory_busy")
    assert answer.headers["Retry-After"] == "5"
