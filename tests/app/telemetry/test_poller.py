"""The poller over fakes: what it looks at, when, and what a hang costs."""

import asyncio
import threading
from types import SimpleNamespace

from llmbox.app.engines.loaded_model import Readiness
from llmbox.app.engines.queue_model import QueueModel
from llmbox.app.events import Events
from llmbox.app.store.record import LiveRequest, RequestRecord
from llmbox.app.telemetry import telemetry
from llmbox.app.telemetry.gpus import GpuReader, HostReader
from llmbox.app.telemetry.snapshot import NA, Tick
from llmbox.app.telemetry.telemetry import Poller, Telemetry
from llmbox.engine.ipc.messages import DraftCounts, EngineStats
from support.fake_nvml import FakeNvml
from support.snapshots import live_request


class FakeGateway:
    def __init__(self) -> None:
        self.requests: list[LiveRequest] = []

    @property
    def open_count(self) -> int:
        return len(self.requests)

    def in_flight(self) -> list[LiveRequest]:
        return self.requests


class FakeEngines:
    def __init__(self) -> None:
        self.supervisor = SimpleNamespace(
            name="m", state="ready", problem="", info=None, stats=EngineStats(), pid=None, pids=[],
            restarts=0, resumed=0, queue=QueueModel(),
            config=SimpleNamespace(model_path="/nowhere"),
        )  # fmt: skip

    def models(self):
        return [SimpleNamespace(name="m", supervisor=self.supervisor)]

    def loading(self):
        return []

    def readiness(self):
        return Readiness(ready=True, cause="")


class FakeStore:
    def submit(self, _, *, failed) -> bool:
        failed("there is no disk")
        return True


class Scene:
    def __init__(self, tmp_path, nvml=None) -> None:
        self.events, self.gateway, self.engines = Events(), FakeGateway(), FakeEngines()
        telemetry = Telemetry(self.engines, self.events, FakeStore(), GpuReader(nvml or FakeNvml()))
        self.latencies, self.error_rates = telemetry.latencies, telemetry.error_rates
        self.poller = Poller(telemetry, self.gateway, HostReader(tmp_path), timeout=60.0)


async def test_a_tick_tells_rates_of_counters(tmp_path):
    scene = Scene(tmp_path)
    first = await scene.poller.poll()
    assert first.totals.tokens_out is NA
    scene.engines.supervisor.stats = EngineStats(
        running=2, waiting=1, blocks_total=10, blocks_used=4, blocks_cached=1,
        steps=5, prompt_tokens=100, output_tokens=50, prefix_queries=200, prefix_hits=150,
        draft_tokens=8, accepted_tokens=6, draft_methods={"ngram": DraftCounts(draft_tokens=8)},
    )  # fmt: skip
    scene.latencies.add(
        RequestRecord(id="r", created=0.0, model="m", endpoint="chat", http_status=200, ttft_s=0.5)
    )
    tick = await scene.poller.poll()
    (engine,) = tick.engines
    assert tick.totals.tokens_out > 0
    assert tick.totals.tokens_in == 2 * tick.totals.tokens_out
    assert (engine.blocks_live, engine.blocks_cached, engine.blocks_free) == (4, 1, 5)
    assert engine.prefix_hit == 0.75
    assert (engine.draft_tokens, engine.accepted_tokens) == (8, 6)
    assert engine.draft_methods["ngram"].draft_tokens == 8
    assert engine.roofline is NA
    assert tick.totals.ttft_p95 == 0.5
    assert tick.totals.kv_used == 0.4
    assert tick.host.memory_total > 0
    assert [process.role for process in tick.host.processes] == ["daemon"]
    scene.engines.supervisor.stats = EngineStats(steps=1, output_tokens=3)  # the engine died and came back
    assert (await scene.poller.poll()).totals.tokens_out is NA


async def test_a_hung_driver_costs_its_readings_and_nothing_else(tmp_path):
    nvml = FakeNvml(hang=threading.Event())
    scene = Scene(tmp_path, nvml)
    scene.poller._gpu_guard._timeout = 0.05  # of the driver alone: the host has all the time it needs
    tick = await scene.poller.poll()
    assert "has not answered" in tick.gpus.problem
    assert tick.host.memory_total > 0
    assert [each.level for each in tick.attention if each.text == tick.gpus.problem] == ["warning"]
    nvml.hang.set()
    async with asyncio.timeout(60):
        while (await scene.poller.poll()).gpus.problem:  # noqa: ASYNC110 - a thread ends when it ends
            await asyncio.sleep(0.01)


async def test_ticks_flow_only_while_somebody_looks(tmp_path):
    scene = Scene(tmp_path)
    begun, poll = [], scene.poller.poll

    async def noted() -> Tick:
        begun.append(asyncio.get_running_loop().time())
        return await poll()

    scene.poller.poll = noted
    running = asyncio.create_task(scene.poller.run())
    try:
        async with asyncio.timeout(60):
            await asyncio.sleep(0.05)
            assert not scene.poller.last.time
            scene.gateway.requests = [live_request(1)]
            feed = scene.events.subscribe()
            ticks = [await anext(feed), await anext(feed)]
    finally:
        running.cancel()
    assert [event.type for event in ticks] == ["tick", "tick"]
    assert [request.id for request in ticks[0].data["requests"]] == ["req-1"]
    assert begun[1] - begun[0] > 0.9
    assert not scene.events._recent, "ticks are not kept for those who were away"
    await feed.aclose()
    assert not scene.poller.is_busy or scene.gateway.requests


async def test_fifty_watchers_have_one_poller(tmp_path):
    """Each tick is computed once, and everybody gets that one; the last to leave ends it."""
    scene = Scene(tmp_path)
    polls, poll = 0, scene.poller.poll

    async def noted() -> Tick:
        nonlocal polls
        polls += 1
        return await poll()

    scene.poller.poll = noted
    running = asyncio.create_task(scene.poller.run())
    feeds = [scene.events.subscribe() for _ in range(50)]
    try:
        async with asyncio.timeout(60):
            first = await asyncio.gather(*(anext(feed) for feed in feeds))
            second = await asyncio.gather(*(anext(feed) for feed in feeds))
        assert polls in {2, 3}, "one more may be under way"
        for events in (first, second):
            assert all(event is events[0] for event in events)
        assert scene.events.subscribers == 50
        for feed in feeds:
            await feed.aclose()
        assert (scene.events.subscribers, scene.poller.is_busy) == (0, False)
    finally:
        running.cancel()


async def test_it_ends_though_somebody_comes_as_it_is_told_to(tmp_path):
    for turns in range(9):
        scene = Scene(tmp_path)
        running = asyncio.create_task(scene.poller.run())
        await asyncio.sleep(0)
        scene.poller.wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running}, timeout=60)
        assert running.cancelled()


async def test_a_failing_look_does_not_end_the_poller(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(telemetry, "IDLE_S", 0.01)
    scene = Scene(tmp_path)
    scene.engines.readiness = lambda: 1 / 0
    running = asyncio.create_task(scene.poller.run())
    async with asyncio.timeout(60):
        while "telemetry failed" not in caplog.text:  # noqa: ASYNC110 - the log has no event
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
