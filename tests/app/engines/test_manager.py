"""The table of loaded models: names, single flight, failures, drain."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.manager import EngineManager
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from llmbox.engine.errors import ModelError
from support.engines import config, is_running, read, request, until
from support.fake_engine import FakeOptions, fake_launch


class FakeText:
    warnings = ()
    encoder = None

    def __init__(self) -> None:
        self.closed = False

    def beside_embedding(self, rows: int) -> "FakeText":
        assert rows == FakeOptions().vocab_size
        return self

    def close(self) -> None:
        self.closed = True


def waiting_for(event: threading.Event) -> Callable[[Path], FakeText]:
    """A text side that is there once the test says so."""

    def load_text(_: Path) -> FakeText:
        event.wait(60)
        return FakeText()

    return load_text


@asynccontextmanager
async def managing(load_text=lambda _: FakeText(), **options):
    manager = EngineManager(load_text, SupervisorOptions(launch=fake_launch(), **options))
    try:
        yield manager
    finally:
        await manager.close()


def refusal(manager: EngineManager, model: str | None) -> tuple[int, str | None, str | None]:
    with pytest.raises(ApiError) as refused:
        manager.get(model)
    return refused.value.status, refused.value.code, refused.value.param


async def test_a_model_that_comes_back_finds_its_tokenizer(tmp_path):
    loads: list[Path] = []

    def load_text(path: Path) -> FakeText:
        loads.append(path)
        return FakeText()

    models = [config(tmp_path, name) for name in "ab"]
    async with managing(load_text) as manager:
        for _ in range(3):
            for model in models:
                await manager.load(model)
                await manager.unload(model.name)
        assert loads == [tmp_path / "a", tmp_path / "b"]


async def test_load_find_unload(tmp_path):
    async with managing() as manager:
        assert readiness(manager) == (True, "")
        assert refusal(manager, None) == (400, "model_required", "model")
        model = await manager.load(config(tmp_path, "a"), alias="chat")
        assert manager.get("a") is manager.get("chat") is manager.get(None) is model
        assert model.name == "a"
        assert not model.text.closed
        assert refusal(manager, "b") == (404, "model_not_found", "model")
        await manager.load(config(tmp_path, "b"))
        assert refusal(manager, None) == (400, "model_required", "model")
        assert [m.name for m in manager.models()] == ["a", "b"]
        pid = model.supervisor.pid
        await manager.unload("chat")
        assert not is_running(pid)
        assert refusal(manager, "a")[0] == 404
        with pytest.raises(ApiError, match="does not exist"):
            await manager.unload("a")


async def test_concurrent_loads_share_one_engine(tmp_path):
    async with managing() as manager:
        wanted = config(tmp_path, load_delay=0.1)
        first, second = await asyncio.gather(manager.load(wanted), manager.load(wanted, alias="x"))
        assert first is second is await manager.load(wanted)
        assert manager.get("x") is first


async def test_a_caller_that_gives_up_does_not_stop_the_load(tmp_path):
    async with managing() as manager:
        waiting = asyncio.create_task(manager.load(config(tmp_path, load_delay=0.1)))
        await until(manager.loading)
        waiting.cancel()
        await until(manager.models)
        assert waiting.cancelled()


def readiness(manager: EngineManager) -> tuple[bool, str]:
    return manager.readiness().ready, manager.readiness().cause


async def test_the_box_is_ready_while_any_model_answers(tmp_path):
    go_on = threading.Event()

    def load_text(path: Path) -> FakeText:
        return waiting_for(go_on)(path) if path.name == "slow" else FakeText()

    async with managing(load_text) as manager:
        with pytest.raises(ApiError):
            await manager.load(config(tmp_path, "broken", load_error=("bad_model", "no config.json")))
        assert not manager.readiness().ready
        await manager.load(config(tmp_path, "good"))
        slow = manager.begin_load(config(tmp_path, "slow"))
        answer = manager.readiness()
        assert (answer.ready, answer.cause) == (True, "broken could not be loaded: no config.json")
        states = [(model.name, model.state) for model in answer.models]
        assert states == [("broken", "failed"), ("good", "ready"), ("slow", "loading")]
        await manager.unload("good")
        assert not manager.readiness().ready, "an operator waits for it"
        go_on.set()
        await slow
        await manager.unload("slow")
        assert manager.readiness().ready, "a request may bring it back"


async def test_a_load_on_request_leaves_the_box_ready(tmp_path):
    go_on = threading.Event()
    async with managing(waiting_for(go_on)) as manager:
        loading = manager.begin_load(config(tmp_path), on_request=True)
        assert readiness(manager) == (True, "")
        assert manager.begin_load(config(tmp_path)) is loading
        assert not manager.readiness().ready, "an operator waits for it too"
        go_on.set()
        await loading


async def test_while_it_loads(tmp_path):
    go_on = threading.Event()
    async with managing(waiting_for(go_on)) as manager:
        loading = manager.begin_load(config(tmp_path), alias="x")
        await until(lambda: manager.loading()[0].state == "ready")
        assert readiness(manager) == (False, "fake is loading: reading its tokenizer")
        for name in ("fake", "x", None):
            assert refusal(manager, name)[:2] == (503, "model_loading")
        go_on.set()
        await loading
        assert readiness(manager) == (True, "")


async def test_a_failing_load_leaves_its_reason_and_nothing_else(tmp_path):
    async with managing() as manager:
        broken = config(tmp_path, "broken", load_error=("bad_model", "no config.json"))
        with pytest.raises(ApiError, match=r"no config\.json"):
            await manager.load(broken)
        assert manager.models() == manager.loading() == []
        assert manager.failures() == {"broken": "no config.json"}
        assert readiness(manager) == (False, "broken could not be loaded: no config.json")
        assert refusal(manager, "broken")[:2] == (503, "model_load_failed")
        await manager.load(config(tmp_path, "broken"))
        assert readiness(manager) == (True, "")


async def test_a_missing_tokenizer_ends_the_engine_too(tmp_path):
    def missing(path):
        raise ModelError(f"{path.name}/tokenizer.json is missing")

    async with managing(missing) as manager:
        task = manager.begin_load(config(tmp_path, load_delay=30))
        supervisor = manager.loading()[0]
        with pytest.raises(ApiError, match="tokenizer") as failed:
            await task
        assert (failed.value.status, failed.value.code) == (400, "bad_model")
        assert supervisor.pid is None


async def test_a_failed_load_does_not_count_as_cancelled(tmp_path, monkeypatch):
    """Else a timeout in what follows ends it silently (Python 3.11.0 to 3.11.2, as in Debian 12)."""
    requests = []
    stop = Supervisor.stop

    async def counting(self, *why):
        requests.append(asyncio.current_task().cancelling())
        await stop(self, *why)

    def missing(path):
        raise ModelError("tokenizer.json is missing")

    monkeypatch.setattr(Supervisor, "stop", counting)
    async with managing(missing) as manager:
        with pytest.raises(ApiError, match="is missing"):
            await manager.load(config(tmp_path, load_delay=30))
        assert manager.failures() == {"fake": "tokenizer.json is missing"}
    assert requests == [0]


async def test_what_ends_a_load_is_its_failure_alone(tmp_path):
    causes = []

    def missing(path):
        raise ModelError(f"{path.name}/tokenizer.json is nested too deeply")

    async with managing(missing, on_change=lambda supervisor: causes.append(supervisor.cause)) as manager:
        with pytest.raises(ApiError, match="too deeply"):
            await manager.load(config(tmp_path, load_delay=30))
    assert "too deeply" in causes[-1]
    assert not any("unloaded" in cause for cause in causes)


async def test_unload_stops_a_load(tmp_path):
    async with managing() as manager:
        manager.begin_load(config(tmp_path, load_delay=30))
        supervisor = manager.loading()[0]
        await until(lambda: supervisor.pid)
        await manager.unload("fake")
        assert supervisor.pid is None
        assert manager.loading() == manager.models() == []


async def test_names_mean_one_model(tmp_path):
    async with managing() as manager:
        await manager.load(config(tmp_path, "a"), alias="chat")
        with pytest.raises(ApiError, match="already belongs"):
            await manager.load(config(tmp_path, "b"), alias="chat")
        with pytest.raises(ApiError, match="other settings"):
            await manager.load(config(tmp_path / "elsewhere", "a"))


async def test_closing_ends_open_streams_and_refuses_new_requests(tmp_path):
    async with managing() as manager:
        model = await manager.load(config(tmp_path, step_delay=0.01))
        stream = model.supervisor.submit(request(1, 4000))
        closing = asyncio.create_task(manager.close())
        await asyncio.sleep(0)
        assert refusal(manager, "fake")[:2] == (503, "draining")
        assert readiness(manager) == (False, "shutting down")
        _, last = await read(stream)
        assert (last.finish_reason, last.error_code) == ("error", "server_shutdown")
        await closing


async def test_a_failed_engine_can_be_loaded_again(tmp_path):
    async with managing() as manager:
        wanted = config(tmp_path)
        model = await manager.load(wanted)
        model.supervisor._give_up("for this test")
        assert readiness(manager) == (False, "fake: for this test")
        again = await manager.load(wanted)
        assert again is not model
        await model.supervisor.stop()


async def test_who_waits_for_a_load_that_is_ended_gets_an_answer(tmp_path):
    """It was cancelled with the load, as if its client had left."""
    async with managing() as manager:
        wanted = config(tmp_path, load_delay=60.0)
        waiting = asyncio.create_task(manager.load(wanted))
        await until(manager.loading)
        await manager.unload("fake")
        with pytest.raises(ApiError) as ended:
            await waiting
        assert (ended.value.status, ended.value.code) == (503, "model_unloaded")
        assert not manager.knows("fake")


async def test_a_load_that_is_ended_before_its_first_step_is_forgotten(tmp_path):
    async with managing() as manager:
        loading = manager.begin_load(config(tmp_path))
        await manager.unload("fake")
        assert loading.cancelled()
        assert not manager.knows("fake")
        await manager.load(config(tmp_path))
