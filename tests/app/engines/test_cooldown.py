"""A model that was given up is tried again after a cool-down, one start at a time; tests turn the clock."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.manager import EngineManager
from llmbox.app.engines.restart_policy import RestartLimits
from llmbox.app.errors import ApiError
from llmbox.app.text.tokenizer.text_loader import load_model_text
from support.clock import Clock
from support.engines import assert_undisturbed, config, kill, read_all, request, supervised, until
from support.fake_engine import fake_launch, write_model
from support.tokenizers_zoo import byte_level, write_text_files

LIMITS = RestartLimits(deaths=2, pauses=(0.0,), cooldown=30.0, longest_cooldown=100.0)


class Sleeps:
    """Waits of a supervisor; each lasts until the test ends it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: list[tuple[float, asyncio.Event]] = []
        self.asked: list[float] = []

    async def __call__(self, seconds: float) -> None:
        if not seconds:
            return
        self.asked.append(seconds)
        end = asyncio.Event()
        self._ends.append((seconds, end))
        await end.wait()

    def end(self) -> None:
        seconds, end = self._ends.pop(0)
        self._clock.now += seconds
        end.set()


@asynccontextmanager
async def given_up(tmp_path, **options):
    """A supervisor whose engine was killed as often as it may be."""
    clock = Clock()
    sleeps = Sleeps(clock)
    settings = {"deaths": LIMITS, "clock": clock, "sleep": sleeps}
    async with supervised(tmp_path, supervisor=settings, **options) as supervisor:
        await kill_until_given_up(supervisor)
        yield supervisor, sleeps, clock


async def kill_until_given_up(supervisor):
    for _ in range(LIMITS.deaths):
        await until(lambda: supervisor.state == "ready")
        restarts = supervisor.restarts
        kill(supervisor)
        await until(lambda seen=restarts: supervisor.restarts > seen)
    await until(lambda: supervisor.state == "failed")


async def test_after_the_cooldown_one_start_makes_it_ready(tmp_path):
    async with given_up(tmp_path) as (supervisor, sleeps, clock):
        assert (supervisor.pid, sleeps.asked) == (None, [30.0])
        clock.now += 10.0
        with pytest.raises(ApiError) as refused:
            supervisor.submit(request(1))
        assert (refused.value.status, refused.value.code) == (503, "engine_failed")
        assert refused.value.headers == {"Retry-After": "20"}
        assert "started again in 20 s" in refused.value.message
        ready, cause = supervisor.readiness()
        assert not ready
        assert "2 times in 60 s" in cause
        assert cause.endswith("it is started again in 20 s")
        clock.now -= 10.0
        sleeps.end()
        await until(lambda: supervisor.state == "ready")
        assert supervisor.readiness() == (True, "")
        await assert_undisturbed([supervisor.submit(request(2))])


async def test_earlier_deaths_do_not_count_after_it(tmp_path):
    async with given_up(tmp_path) as (supervisor, sleeps, _):
        sleeps.end()
        await until(lambda: supervisor.state == "ready")
        restarts = supervisor.restarts
        kill(supervisor)
        await until(lambda: supervisor.restarts > restarts and supervisor.state == "ready")


async def test_a_start_that_fails_waits_longer_and_says_why(tmp_path):
    async with given_up(tmp_path) as (supervisor, sleeps, _):
        write_model(tmp_path / "fake", load_error=("bad_model", "a shard is missing"))
        for seconds in (60.0, 100.0, 100.0):
            tries = len(sleeps.asked)
            sleeps.end()
            await until(lambda seen=tries: len(sleeps.asked) > seen)
            assert (supervisor.state, sleeps.asked[-1]) == ("failed", seconds)
            assert "could not be started again: a shard is missing" in supervisor.problem
        write_model(tmp_path / "fake")
        sleeps.end()
        await until(lambda: supervisor.state == "ready")
        await assert_undisturbed([supervisor.submit(request(2))])


async def test_requests_wait_for_the_start_that_is_tried_and_end_with_it(tmp_path):
    async with given_up(tmp_path) as (supervisor, sleeps, _):
        write_model(tmp_path / "fake", load_delay=0.5, load_error=("bad_model", "broken"))
        sleeps.end()
        await until(lambda: supervisor.state == "restarting")
        [(_, last)] = await read_all([supervisor.submit(request(1))])
        assert last.error_code == "engine_failed"
        assert supervisor.state == "failed"


async def test_memory_that_others_took_is_a_failed_try(tmp_path):
    async with given_up(tmp_path) as (supervisor, sleeps, _):

        async def refuse(config):
            raise ApiError(503, "other models fill the memory", "memory_busy")

        admit, supervisor.readmit = supervisor.readmit, refuse
        sleeps.end()
        await until(lambda: len(sleeps.asked) == 2)
        assert "other models fill the memory" in supervisor.problem
        supervisor.readmit = admit
        sleeps.end()
        await until(lambda: supervisor.state == "ready")


async def test_it_can_be_unloaded_while_it_waits(tmp_path):
    async with given_up(tmp_path) as (supervisor, _, _):
        await supervisor.stop()
        assert supervisor.state == "stopped"


@pytest.fixture
async def manager():
    manager = EngineManager(load_model_text, SupervisorOptions(launch=fake_launch(), deaths=LIMITS))
    yield manager
    await manager.close()


async def test_a_load_by_the_owner_tries_at_once(tmp_path, manager):
    write_text_files(tmp_path / "fake", byte_level())
    wanted = config(tmp_path)
    first = await manager.load(wanted)
    await kill_until_given_up(first.supervisor)
    assert manager.readiness().models[0].state == "failed"
    second = await manager.load(wanted)
    assert second.supervisor.state == "ready"
    assert second.supervisor is not first.supervisor
    await until(first.supervisor._task.done)
    assert manager.models() == [second]


async def test_a_start_after_the_cooldown_takes_no_room_of_the_owners_models(tmp_path, manager):
    write_text_files(tmp_path / "fake", byte_level())
    asked = []

    async def admit(wanted, on_request):
        asked.append(on_request)
        return wanted

    manager.admit = admit
    model = await manager.load(config(tmp_path))
    await model.supervisor.readmit(model.config)
    assert asked == [False, True]
