"""Several models in one memory, with fake engines: loads on request, evictions, time to live, pins."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.config.model_settings import MemorySettings
from llmbox.app.config.settings import Settings
from llmbox.app.control import model_scheduler
from llmbox.app.control.model_scheduler import ModelScheduler, SchedulerDeps
from llmbox.app.control.residency import MemoryNeed, least_bytes, seen_from, sizes
from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.eviction import HOST, MemoryRequest, Place, budgets, choose_placement
from llmbox.app.engines.manager import EngineManager
from llmbox.app.errors import ApiError
from llmbox.app.events import Events
from llmbox.app.models.catalog import ModelRef
from llmbox.app.models.registry import Alias, Registry
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit
from llmbox.engine.hardware.gpus import Gpu
from llmbox.engine.hardware.machine import Cpu, Machine, Memory
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from support.engines import read, request, until
from support.fake_engine import fake_launch, write_model
from support.hub_models import model_files
from support.tiny_models import tiny_config
from support.tokenizers_zoo import byte_level, write_text_files

MACHINE = Machine(Cpu("test", 1, 1, ()), Memory(0, 0, limited_by_cgroup=False), (), None)
SIZE = 17_000
HOST_BUDGET = 1000
"""Bytes of each fake model here: 1000 of weights and 1000 blocks of 16 tokens of a byte."""


class House:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0
        self.settings = Settings()
        self.need: dict[str, int] = {}
        self.host = 0
        """Main memory that each model needs beside its GPU, of `HOST_BUDGET` bytes."""
        self.available = 0
        """Main memory that is available beside all models in it."""
        self.budgets: tuple[int, ...] = (40_000,)
        self.device: Place = "cpu"
        self.meanwhile: Callable[[], object] = lambda: None
        """Called in a thread, while a model's memory is estimated."""
        self.registry = Registry(folder / "models.json")
        self.events = Events()
        self.engines = EngineManager(load_model_text, SupervisorOptions(launch=fake_launch()))
        world = SchedulerDeps(
            settings=lambda: self.settings,
            find=self.find,
            registry=self.registry,
            clock=lambda: self.now,
            machine=lambda: MACHINE,
            device=lambda *_: self.device,
            budgets=lambda _machine, _device, gb: self.budgets if gb is None else (int(gb * 1e9),),
            sizes=self.sizes,
        )
        self.residency = ModelScheduler(self.engines, self.events, world)

    def model(self, name: str, **options: Any) -> Path:
        place = self.folder / "models" / name
        write_text_files(place, byte_level())
        return write_model(place, **{"num_blocks": 1000, "context": 256, **options})

    def find(self, name: str) -> ModelRef | None:
        alias = self.registry.read().aliases.get(name)
        name = alias.model if alias else name
        place = self.folder / "models" / name
        return ModelRef(name, place, "hub") if place.is_dir() else None

    def sizes(
        self, config: EngineConfig, _machine: Machine, budgets: tuple[int, ...], ours: Mapping[int, int]
    ) -> MemoryNeed | None:
        self.meanwhile()
        need = self.need.get(config.name, SIZE)
        if need > 10**6:
            raise DoesNotFit(f"needs {need} and has {budgets}")
        ranks = config.tp or 1
        places = [tuple(range(i, i + ranks)) for i in range(0, len(budgets) - ranks + 1, ranks)]
        requests = [
            MemoryRequest(each, need // ranks, need // ranks, self.host, self.host) for each in places
        ]
        return MemoryNeed(self.device, tuple(requests), budgets, HOST_BUDGET, self.available)

    def config(self, name: str) -> EngineConfig:
        return EngineConfig(model_path=str(self.folder / "models" / name), name=name)

    def gpus(self, name: str) -> tuple[int, ...] | None:
        model = self.engines.find(name)  # `get` would be a use
        assert model is not None
        return model.supervisor.admitted.gpus

    async def ask(self, name: str) -> None:
        """One request from its beginning to its end, in a task of its own."""

        async def work() -> None:
            model = await self.residency.find(name)
            self.now += 1
            number = int(self.now)
            await read(model.supervisor.submit(request(number, 2)))

        await asyncio.create_task(work())
        await asyncio.sleep(0)

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.engines.models()]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events._recent if event.type == kind]


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[House]:
    house = House(folder)
    for name in "abc":
        house.model(name)
    try:
        yield house
    finally:
        await house.residency.close()
        await house.engines.close()


async def test_a_request_loads_what_is_on_disk_and_the_oldest_leaves(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        await house.ask("b")
        assert house.names == ["a", "b"]
        await house.ask("a")
        await house.ask("c")
        assert house.names == ["a", "c"]
        (evicted,) = house.told("model.evicted")
        assert evicted == {"model": "b", "reason": "to make room for c", "freed": SIZE}
        assert [event["model"] for event in house.told("model.loading")] == ["a", "b", "c"]
        with pytest.raises(ApiError) as refused:
            await house.residency.find("absent")
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("available", [SIZE - 1, SIZE])
async def test_a_load_waits_for_the_end_of_another_engine_only_for_its_memory(tmp_path: Path, available: int):
    async with opened(tmp_path) as house:
        house.budgets = (SIZE,)
        await house.ask("a")
        model = house.engines.find("a")
        assert model is not None
        stop, begun, may_end = model.supervisor.stop, asyncio.Event(), asyncio.Event()

        async def stop_slowly() -> None:
            begun.set()
            await may_end.wait()
            await stop()

        model.supervisor.stop = stop_slowly  # type: ignore[method-assign, assignment]
        house.available, pid = available, model.supervisor.pid
        loading = asyncio.create_task(house.ask("b"))
        await begun.wait()
        if available < SIZE:
            assert not house.names
            may_end.set()
            await loading
            assert model.supervisor.pid is None
            assert house.engines.get("b").supervisor.admitted.memory_after == ()
            return
        started = house.engines.loading()[0]
        await started.launched()
        assert started.admitted.memory_after == (pid,)
        await loading
        assert house.names == ["b"]
        assert started.admitted.memory_after == (), "a later start waits for no process of this number"
        again = asyncio.create_task(house.ask("a"))
        await until(house.engines.loading)
        assert house.names == ["b"], "the memory of one that still ends is not counted as free or as ours"
        may_end.set()
        await again
        assert house.names == ["a"]


@pytest.mark.parametrize("begins", ["before", "while memory is estimated"])
async def test_an_unload_that_takes_its_time_holds_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
):
    async with opened(tmp_path) as house:
        house.budgets = (SIZE,)
        await house.ask("a")
        model = house.engines.get("a")
        stop, begun, may_end = model.supervisor.stop, asyncio.Event(), asyncio.Event()
        placed_beside: list[int | None] = []

        async def stop_slowly() -> None:
            begun.set()
            await may_end.wait()
            await stop()

        async def finish_unloads() -> None:
            if house.engines._ending:
                may_end.set()
            await EngineManager.finish_unloads(house.engines)

        def place(*args: Any, **options: Any) -> Any:
            placed_beside.append(model.supervisor.pid)
            may_end.set()
            return choose_placement(*args, **options)

        model.supervisor.stop = stop_slowly  # type: ignore[method-assign, assignment]
        monkeypatch.setattr(house.engines, "finish_unloads", finish_unloads)
        monkeypatch.setattr(model_scheduler, "choose_placement", place)
        if begins == "before":
            unloading = asyncio.create_task(house.engines.unload("a"))
            await begun.wait()
            await asyncio.gather(unloading, house.ask("b"))
        else:
            loop = asyncio.get_running_loop()

            async def begin() -> None:
                house.engines.begin_unload(model)
                await begun.wait()

            house.meanwhile = lambda: asyncio.run_coroutine_threadsafe(begin(), loop).result()
            await house.ask("b")
        assert placed_beside == [None], "its process still had its memory"
        assert house.names == ["b"]


async def test_a_model_that_expires_while_another_one_leaves_holds_its_memory(tmp_path: Path):
    """Both leave for a third model, which needs the memory of both."""
    async with opened(tmp_path) as house:
        house.budgets, house.need = (2 * SIZE,), {"c": 2 * SIZE}
        await house.ask("a")
        await house.ask("b")
        gates = {name: asyncio.Event() for name in "ab"}

        async def stop_slowly(stop: Callable[[], Awaitable[None]], gate: asyncio.Event) -> None:
            await gate.wait()
            await stop()

        models = house.engines.models()
        for model in models:
            stop = partial(stop_slowly, model.supervisor.stop, gates[model.name])
            model.supervisor.stop = stop  # type: ignore[method-assign, assignment]
        loading = asyncio.create_task(house.ask("c"))
        await until(lambda: house.names == ["b"])
        house.residency.set_ttl(models[1], 0.0)
        house.residency.expire()
        await until(lambda: not house.names)
        gates["a"].set()
        await until(lambda: models[0].supervisor.pid is None)
        for _ in range(20):
            await asyncio.sleep(0)
        started = house.engines.loading()[0].pid
        gates["b"].set()
        assert started is None, "it starts beside an engine whose memory it gets"
        await loading
        assert (house.names, models[1].supervisor.pid) == (["c"], None)


async def test_a_daemon_that_ends_waits_for_engines_that_leave(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.budgets, house.available = (SIZE,), SIZE
        await house.ask("a")
        model = house.engines.find("a")
        await house.ask("b")
    assert model is not None
    assert model.supervisor.pid is None


async def test_each_gets_its_share_and_no_more(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        model = house.engines.get("a")
        assert model.supervisor.admitted.memory_bytes == SIZE
        assert model.config.memory_bytes is None


async def test_requests_at_once_share_one_load(tmp_path: Path):
    async with opened(tmp_path) as house:
        await asyncio.gather(*(house.residency.find("a") for _ in range(5)))
        assert len(house.told("model.loading")) == 1


async def test_a_released_model_leaves_when_its_last_request_has_ended(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        model = house.engines.find("a")
        assert model is not None
        assert model.on_request
        go = asyncio.Event()
        using = asyncio.create_task(guest(house, go))
        await until(lambda: model.busy)
        await house.residency.release(model)
        house.residency.expire()
        assert house.names == ["a"]
        go.set()
        await using
        await until(lambda: house.told("model.evicted"))  # said once its process has ended
        assert house.names == []


async def guest(house: House, go: asyncio.Event) -> None:
    await house.residency.find("a")
    await go.wait()


async def test_an_idle_one_is_released_at_once_and_a_pinned_one_never(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        model = house.residency.pin("a", pinned=True)
        with pytest.raises(ApiError) as refused:
            await house.residency.release(model)
        assert (refused.value.status, refused.value.code) == (409, "model_pinned")
        assert house.names == ["a"]
        house.residency.pin("a", pinned=False)
        await house.residency.release(model)
        assert house.names == []


async def test_how_long_one_stays_can_be_changed(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        model = house.engines.find("a")
        assert model is not None
        house.residency.set_ttl(model, 10.0)
        house.now += 9
        house.residency.expire()
        assert house.names == ["a"]
        house.residency.set_ttl(model, None)
        house.now += 1_000_000
        house.residency.expire()
        assert house.names == ["a"]


async def test_busy_and_pinned_models_stay_and_the_refusal_has_numbers(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        await house.ask("b")
        house.residency.pin("a", pinned=True)
        stream = house.engines.get("b").supervisor.submit(request(1, 10**6))
        with pytest.raises(ApiError) as refused:
            await house.residency.find("c")
        assert (refused.value.status, refused.value.code) == (503, "memory_busy")
        assert "c needs 0.1 MB and 0.0 MB are available while a is pinned, b is busy" in refused.value.message
        assert house.engines.failures() == {}
        assert house.engines.readiness().ready
        house.residency.pin("a", pinned=False)
        await asyncio.create_task(house.ask("c"))
        assert house.names == ["b", "c"]
        stream.cancel()


async def test_a_request_that_only_found_its_model_keeps_it(tmp_path: Path):
    """Between finding the model and submitting, templates are rendered: it must not leave meanwhile."""
    async with opened(tmp_path) as house:
        await house.ask("a")
        await house.ask("b")
        go_on = asyncio.Event()

        async def slow() -> str:
            model = await house.residency.find("a")
            await go_on.wait()
            return str(model.supervisor.state)

        task = asyncio.create_task(slow())
        await asyncio.sleep(0.01)
        await house.ask("c")
        assert house.names == ["a", "c"]
        go_on.set()
        assert await task == "ready"


async def test_what_can_never_fit_is_refused_and_nobody_leaves_for_it(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        for need in (50_000, 10**7):
            house.need["b"] = need
            with pytest.raises(ApiError) as refused:
                await house.residency.find("b")
            assert (refused.value.status, refused.value.code) == (400, "does_not_fit")
        assert house.names == ["a"]
        assert house.engines.readiness().ready


async def test_a_load_that_fails_is_the_requests_failure_only(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.model("bad", load_error=("bad_model", f"{house.folder}/models/bad/x: broken weights"))
        with pytest.raises(ApiError, match=r"^x: broken weights"):
            await house.residency.find("bad")
        assert house.engines.readiness().ready
        house.model("bad")
        await house.ask("bad")


async def test_a_load_that_failed_is_not_begun_again_by_every_request(tmp_path: Path):
    async with opened(tmp_path) as house:
        place = house.model("bad", load_error=("bad_model", "broken weights"))

        async def refusal() -> tuple[int, str | None]:
            begun = len(house.told("model.loading"))
            with pytest.raises(ApiError, match="broken weights") as refused:
                await house.residency.find("bad")
            return len(house.told("model.loading")) - begun, refused.value.headers.get("Retry-After")

        assert await refusal() == (1, None)
        assert await refusal() == (0, "5")
        house.now += 4.5
        assert await refusal() == (0, "1")
        house.now += 1
        assert await refusal() == (1, None)
        assert await refusal() == (0, "10")
        (place / "model.safetensors").write_bytes(b"other")
        assert await refusal() == (1, None)
        assert await refusal() == (0, "5")
        house.residency.failed.clear()  # as a reload of the settings does
        assert await refusal() == (1, None)


async def test_loading_on_request_can_be_switched_off(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.settings = replace(house.settings, memory=MemorySettings(load_on_request=False))
        with pytest.raises(ApiError) as refused:
            await house.residency.find("a")
        assert refused.value.status == 404


async def test_a_request_does_not_evict_what_the_owner_loaded(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.residency.keep(await house.engines.load(house.config("a")), ttl=None)
        await house.ask("b")
        await house.ask("c")
        assert house.names == ["a", "c"], "the request's own leave, however old the owner's is"
        model = house.engines.find("c")
        assert model is not None
        model.on_request = False  # as after `llmbox load c`
        with pytest.raises(ApiError) as refused:
            await house.residency.find("b")
        assert (refused.value.status, refused.value.code) == (503, "memory_busy")
        assert "a is kept for the box's owner, c is kept for the box's owner" in refused.value.message
        assert house.names == ["a", "c"]
        await house.engines.load(house.config("b"))
        assert "b" in house.names, "the owner decides"


async def test_the_owners_model_comes_back_as_it_was(tmp_path: Path):
    """Also one that has no name on disk, as a folder that was loaded once."""
    async with opened(tmp_path) as house:
        place = house.model("elsewhere")
        config = EngineConfig(model_path=str(place), name="mine", max_running=3)
        await house.residency.keep(await house.engines.load(config, alias="my"), ttl=50.0)
        house.now += 51
        house.residency.expire()
        await until(lambda: house.told("model.evicted"))
        assert house.names == []
        for name in ("mine", "my"):
            model = await house.residency.find(name)
            assert (model.name, model.config, model.ttl) == ("mine", config, 50.0)
            assert (model.on_request, model.aliases) == (False, {"my"})
        assert house.residency.evicted.all() == []


@pytest.mark.parametrize("ttl", [None, 50.0])
async def test_a_release_while_busy_ends_one_load_and_not_those_after_it(tmp_path: Path, ttl: float | None):
    async with opened(tmp_path) as house:
        model = await house.engines.load(house.config("a"))
        await house.residency.keep(model, ttl=ttl)
        go = asyncio.Event()
        using = asyncio.create_task(guest(house, go))
        await until(lambda: model.busy)
        await house.residency.release(model)
        go.set()
        await using
        await until(lambda: house.told("model.evicted"))
        assert house.names == []
        await house.ask("a")
        house.residency.expire()
        again = house.engines.find("a")
        assert again is not None
        assert (again.ttl, again.on_request) == (ttl, False)


async def test_an_evicted_model_says_why_where_requests_load_nothing(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.settings = replace(house.settings, memory=MemorySettings(load_on_request=False))
        for name in "abc":
            await house.residency.keep(await house.engines.load(house.config(name)), ttl=None)
            house.now += 1
        with pytest.raises(ApiError) as refused:
            await house.residency.find("a")
        assert (refused.value.status, refused.value.code) == (503, "model_evicted")
        assert "a was evicted to make room for c" in refused.value.message
        await house.engines.unload("b")
        await house.residency.keep(await house.engines.load(house.config("a")), ttl=None)
        assert (await house.residency.find("a")).name == "a"


async def test_an_evicted_model_whose_files_are_gone_is_gone(tmp_path: Path):
    async with opened(tmp_path) as house:
        place = house.model("elsewhere")
        config = EngineConfig(model_path=str(place), name="mine")
        await house.residency.keep(await house.engines.load(config), ttl=1.0)
        house.now += 2
        house.residency.expire()
        await until(lambda: house.told("model.evicted"))
        shutil.rmtree(place)
        with pytest.raises(ApiError) as refused:
            await house.residency.find("mine")
        assert refused.value.status == 404


async def test_idle_models_leave_in_time(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.settings = replace(house.settings, memory=MemorySettings(ttl=60.0, budget=1e-4))
        await house.ask("a")
        await house.ask("b")
        house.residency.pin("b", pinned=True)
        explicit = await house.engines.load(EngineConfig(model_path=str(house.folder / "models/c"), name="c"))
        await house.residency.keep(explicit, ttl=None)
        house.now += 58
        house.residency.expire()
        assert house.names == ["a", "b", "c"]
        house.now += 3
        house.residency.expire()
        await asyncio.gather(*house.residency._leaving)
        assert house.names == ["b", "c"]
        assert house.told("model.evicted")[0]["reason"] == "after 60 s without requests"
        house.residency.pin("b", pinned=False)
        await house.residency.keep(house.engines.get("c"), ttl=1.0)
        await asyncio.sleep(0)
        assert house.residency._timer is not None


async def test_the_timer_itself(tmp_path: Path):
    async with opened(tmp_path) as house:
        await house.ask("a")
        model = house.engines.find("a")
        assert model is not None
        house.now = model.idle_since + 5
        await house.residency.keep(model, ttl=5.0)
        async with asyncio.timeout(90):
            while house.names:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert house.residency._timer is None


async def test_aliases_are_variants_over_one_load(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.registry.set_alias("poet", Alias("a", {"temperature": 0.1, "system": "Rhyme.", "ctx": 32}))
        poet = await house.residency.find("poet")
        plain = await house.residency.find("a")
        assert house.names == ["a"]
        assert poet.supervisor is plain.supervisor
        assert poet.text.generation_defaults["temperature"] == 0.1
        assert (poet.text.system, poet.context_cap) == ("Rhyme.", 32)
        assert (plain.text.system, plain.context_cap) == (None, None)
        assert house.residency.pin("poet", pinned=True) is plain
        house.registry.set_alias("lost", Alias("absent"))
        with pytest.raises(ApiError) as refused:
            await house.residency.find("lost")
        assert refused.value.status == 404


async def test_pinning_what_is_not_there(tmp_path: Path):
    async with opened(tmp_path) as house:
        with pytest.raises(ApiError) as refused:
            house.residency.pin("a", pinned=True)
        assert refused.value.status == 404


async def test_each_gpu_is_filled_on_its_own(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.device, house.budgets = "cuda", (20_000, 20_000)
        await house.ask("a")
        await house.ask("b")
        assert [house.gpus(name) for name in "ab"] == [(0,), (1,)]
        await house.ask("a")
        await house.ask("c")
        assert house.names == ["a", "c"]
        assert house.gpus("c") == (1,)


async def test_a_model_on_two_gpus_takes_from_both(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.device, house.budgets = "cuda", (20_000, 20_000, 20_000)
        shared = EngineConfig(model_path=str(house.folder / "models/a"), name="a", tp=2)
        await house.engines.load(shared, on_request=True)
        (resident,) = house.residency.residents()
        assert resident.takes == {0: SIZE // 2, 1: SIZE // 2}
        await house.ask("b")
        assert house.gpus("b") == (2,)
        await house.ask("c")
        assert house.names == ["b", "c"]
        assert house.told("model.evicted") == [{"model": "a", "reason": "to make room for c", "freed": SIZE}]


async def test_what_is_loaded_on_gpus_takes_no_memory_of_the_machine(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.model("a", load_delay=0.2)
        house.device = "cuda"
        loading = asyncio.ensure_future(house.engines.load(house.config("a")))
        await until(lambda: house.residency.residents("cuda"))  # promised as its engine starts
        assert house.residency.residents("cpu") == []
        await loading
        assert [each.name for each in house.residency.residents("cuda")] == ["a"]
        assert house.residency.residents("cpu") == []


async def test_main_memory_of_models_on_gpus_is_one_budget(tmp_path: Path):
    """Experts and evicted blocks are in it: they are counted for later models, on GPUs and on CPUs."""
    async with opened(tmp_path) as house:
        for name in ("a", "b", "c", "d"):
            house.model(name, host_bytes=400)
        house.device, house.budgets, house.host = "cuda", (40_000,) * 3, 400
        await house.ask("a")
        await house.ask("b")
        admitted = [model.supervisor.admitted for model in house.engines.models()]
        assert [each.host_bytes_limit for each in admitted] == [1000, 600]
        assert [each.takes[HOST] for each in house.residency.residents("cuda")] == [400, 400]
        assert [each.takes for each in house.residency.residents("cpu")] == [{0: 400}, {0: 400}]
        await house.ask("c")
        assert house.names == ["b", "c"], "all cards have room, and main memory has not"
        house.host = 1001
        with pytest.raises(ApiError, match=r"of main memory and .*: the memory budget is too small"):
            await house.ask("d")
        house.host = 900
        for name in ("b", "c"):
            house.residency.pin(name, pinned=True)
        with pytest.raises(ApiError, match=r"of main memory and .* while b is pinned, c is pinned"):
            await house.ask("a")


def test_models_on_cpus_and_gpus_see_each_others_main_memory():
    on_gpus = {0: 5, 2: 5, HOST: 7}
    assert seen_from("cuda", "cuda", on_gpus) == seen_from(None, "cuda", on_gpus) == on_gpus
    assert seen_from("cpu", "cuda", on_gpus) == {0: 7}
    assert seen_from("cuda", "cpu", {0: 9}) == {HOST: 9}
    assert seen_from("cpu", "cuda", {0: 5}) == {}


def test_experts_in_main_memory_are_asked_for_with_the_share_that_is_never_taken(tmp_path: Path):
    sizes_of = {"moe_intermediate_size": 1 << 14, "num_experts": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe") | sizes_of))
    gb = 10**9
    machine = Machine(
        Cpu("test", 2, 4, ()),
        Memory(100 * gb, 90 * gb, limited_by_cgroup=False),
        (Gpu(0, "card", "GPU-0", 8 * gb, 8 * gb, None),),
        None,
    )
    config = EngineConfig(model_path=str(tmp_path), name="x", cpu_experts="on", kv_host_bytes=gb)
    found = sizes(config, machine, (7 * gb,), {HOST: 30 * gb})
    assert found is not None
    assert found.host == 80 * gb, "of 100"
    assert found.budgets == {0: 7 * gb, HOST: 80 * gb}
    limited = replace(machine, memory=Memory(80 * gb, 50 * gb, limited_by_cgroup=True))
    in_container = sizes(config, limited, (7 * gb,), {HOST: 30 * gb})
    assert in_container is not None
    assert in_container.host == 64 * gb, "of 80, of which models have 30"
    (wish,) = found.requests
    plan = estimate(
        parse_config(tmp_path).shape(),
        replace(MemoryBudget.of(machine, "cuda"), available=7 * gb, host_available=80 * gb),
        config,
    )
    assert wish.host_want == plan.expert_bytes + gb
    assert 0.8 * wish.host >= plan.expert_bytes > 0.8 * (wish.host - 2)


def test_models_in_a_control_group_count_once():
    gb = 10**9
    cpu, memory = Cpu("test", 2, 4, ()), Memory(10 * gb, 3 * gb, limited_by_cgroup=True)
    machine = Machine(cpu, memory, (), None)  # loaded models take 6 GB
    assert budgets(machine, "cpu", None) == (8 * gb,), "of which they then take 6"
    assert budgets(machine, "cpu", 9.0) == (9 * gb,)
    assert budgets(machine, "cpu", 12.0) == (10 * gb,)


def test_each_gpu_has_a_budget_and_what_others_hold_there_is_not_counted_on(tmp_path: Path):
    for name, data in model_files().items():
        (tmp_path / name).write_bytes(data)
    gb = 10**9
    cards = [Gpu(n, f"card {n}", f"GPU-{n}", size * gb, free * gb, None) for n, size, free in CARDS]
    machine = Machine(
        Cpu("test", 2, 4, ()), Memory(8 * gb, 4 * gb, limited_by_cgroup=False), tuple(cards), None
    )
    assert budgets(machine, "cuda", None) == (9 * gb, 36 * gb, 36 * gb)
    assert budgets(machine, "cuda", 12.0) == (10 * gb, 12 * gb, 12 * gb)
    config = EngineConfig(model_path=str(tmp_path), name="x", device="cuda")
    found = sizes(config, machine, budgets(machine, "cuda", None), {1: 3 * gb})
    assert found is not None
    assert found.have == (8 * gb, 8 * gb, 36 * gb)
    assert [wish.places for wish in found.requests] == [(0,), (1,), (2,)]
    pairs = sizes(replace(config, tp=2), machine, budgets(machine, "cuda", None), {})
    assert pairs is not None
    assert [wish.places for wish in pairs.requests] == [(0, 1), (1, 2), (0, 2)]


CARDS = ((0, 10, 8), (1, 40, 5), (2, 40, 39))
"""Number, GB in all, GB free."""


def test_sizes_are_the_engines_own_estimate(tmp_path: Path):
    for name, data in model_files().items():
        (tmp_path / name).write_bytes(data)
    machine = Machine(
        Cpu("test", 2, 4, ()), Memory(8_000_000_000, 4_000_000_000, limited_by_cgroup=False), (), None
    )
    config = EngineConfig(model_path=str(tmp_path), name="x", device="cpu")
    found = sizes(config, machine, (6_000_000_000,), {0: 1_000_000_000})
    plan = estimate(
        parse_config(tmp_path).shape(),
        replace(MemoryBudget.of(machine, "cpu"), available=5_000_000_000),
        config,
    )
    wish = MemoryRequest((0,), least_bytes(plan), plan.total_bytes)
    assert found == MemoryNeed("cpu", (wish,), (5_000_000_000,), available=4_000_000_000)
    share = replace(config, memory_bytes=wish.need)
    small = estimate(
        parse_config(tmp_path).shape(), replace(MemoryBudget.of(machine, "cpu"), available=10**10), share
    )
    assert small.context == plan.context
    assert sizes(replace(config, model_path=str(tmp_path / "none")), machine, (10**9,), {}) is None
    with pytest.raises(DoesNotFit):
        sizes(config, machine, (1_000_000,), {})


async def test_a_request_by_an_alias_waits_for_the_load_that_another_began(tmp_path: Path):
    async with opened(tmp_path) as house:
        house.registry.set_alias("poet", Alias("a", {}))
        first = asyncio.create_task(house.residency.find("a"))
        await until(house.engines.loading)
        assert (await house.residency.find("poet")).name == (await first).name == "a"


async def test_an_alias_of_a_folder_means_the_model_that_was_loaded_from_it(tmp_path: Path):
    async with opened(tmp_path) as house:
        folder = house.model("a")
        await house.engines.load(replace(house.config("a"), name="served"))
        house.registry.set_alias("poet", Alias(str(folder), {"temperature": 0.5}))
        house.registry.adopt_directory("mine", folder)
        assert (await house.residency.find("poet")).name == "served"
        assert (await house.residency.find("mine")).name == "served"
        assert house.residency.real_name("poet") == "served"
        assert house.residency.real_name(str(folder)) == str(folder)  # clients name no paths
        assert house.names == ["served"]


async def test_an_alias_of_a_folder_brings_back_the_model_that_the_owner_loaded_from_it(tmp_path: Path):
    async with opened(tmp_path) as house:
        folder = house.model("a")
        model = await house.engines.load(replace(house.config("a"), name="served"))
        await house.residency.keep(model, ttl=None)
        house.residency.evicted.add(model, "to make room")
        await house.engines.unload("served")
        house.registry.set_alias("poet", Alias(str(folder)))
        assert (await house.residency.find("poet")).name == "served"
