"""A request that brings the engine down fails alone; its neighbors get their undisturbed tokens."""

import asyncio
import time

import pytest

from llmbox.app.engines.restart_policy import RestartLimits, WatchLimits
from support.engines import assert_undisturbed, read, read_all, request, supervised, until

POISON = 251
FAST = RestartLimits(pauses=(0.0,))


def poisoned(number: int, **changes):
    return request(number, prompt_ids=[number % 250, POISON], **changes)


@pytest.mark.parametrize("kind", ["exception", "segv"])
async def test_the_poisoned_one_of_many_fails_alone(tmp_path, kind):
    async with supervised(
        tmp_path, supervisor={"deaths": FAST}, step_delay=0.002, poison=POISON, poison_kind=kind
    ) as supervisor:
        healthy = [supervisor.submit(request(i, 120)) for i in range(20)]
        await until(lambda: healthy[0].output_ids)
        bad = supervisor.submit(poisoned(1000))
        healthy += [supervisor.submit(request(i, 120)) for i in range(20, 24)]
        ends = asyncio.create_task(read_all([bad]))
        await assert_undisturbed(healthy)
        [(tokens, last)] = await ends
        assert tokens == []
        assert (last.finish_reason, last.error_code) == ("error", "engine_error")
        assert supervisor.restarts <= 4
        assert supervisor.state == "ready"


async def test_alone_it_fails_at_the_second_death(tmp_path):
    async with supervised(tmp_path, poison=POISON) as supervisor:
        _, last = await read(supervisor.submit(poisoned(1)))
        assert last.error_code == "engine_error"
        assert supervisor.restarts == 2
        await assert_undisturbed([supervisor.submit(request(2))])


async def test_poison_that_works_late(tmp_path):
    """It has delivered tokens when it strikes: they stay delivered, and it is still found."""
    async with supervised(
        tmp_path, supervisor={"deaths": FAST}, step_delay=0.002, poison=POISON, poison_after=20
    ) as supervisor:
        healthy = [supervisor.submit(request(i, 150)) for i in range(8)]
        bad = supervisor.submit(poisoned(1000))
        ends = asyncio.create_task(read(bad))
        await assert_undisturbed(healthy)
        tokens, last = await ends
        assert len(tokens) == 20
        assert last.error_code == "engine_error"


async def test_several_poisons_and_retrying_clients(tmp_path):
    """Two at once, and both sent again: seven deaths in a row do not end the model."""
    async with supervised(
        tmp_path, supervisor={"deaths": FAST}, step_delay=0.002, poison=POISON
    ) as supervisor:
        healthy = [supervisor.submit(request(i, 400)) for i in range(6)]
        ends = asyncio.create_task(assert_undisturbed(healthy))
        for attempt in range(2):
            bad = [supervisor.submit(poisoned(1000 + 10 * attempt + i)) for i in range(2)]
            for _, last in await read_all(bad):
                assert last.error_code == "engine_error"
        await ends
        assert supervisor.state == "ready"


async def test_an_engine_on_which_everything_is_fatal_is_given_up(tmp_path):
    watched = {"deaths": FAST, "clock": lambda: time.monotonic() / 100}  # restarts may take half a minute
    async with supervised(tmp_path, supervisor=watched, step_delay=0.001, die_after_steps=0) as supervisor:
        ends = await read_all([supervisor.submit(request(i)) for i in range(20)])
        assert {last.error_code for _, last in ends} == {"engine_error", "engine_failed"}
        assert supervisor.state == "failed"
        assert "told to die" in supervisor.cause


async def test_a_request_that_hangs_the_engine(tmp_path):
    watch = WatchLimits(tick=0.2)
    async with supervised(
        tmp_path,
        supervisor={"deaths": FAST, "watch": watch},
        step_delay=0.01,
        poison=POISON,
        poison_kind="sleep",
    ) as supervisor:
        healthy = [supervisor.submit(request(i, 60)) for i in range(5)]
        bad = supervisor.submit(poisoned(1000))
        ends = asyncio.create_task(read(bad))
        await assert_undisturbed(healthy)
        assert (await ends)[1].error_code == "engine_error"


async def test_a_poisoned_client_that_leaves_harms_nobody(tmp_path):
    async with supervised(
        tmp_path, supervisor={"deaths": FAST}, step_delay=0.002, poison=POISON
    ) as supervisor:
        healthy = [supervisor.submit(request(i, 200)) for i in range(6)]
        ends = asyncio.create_task(assert_undisturbed(healthy))
        for attempt in range(4):
            bad = supervisor.submit(poisoned(1000 + attempt))
            restarts = supervisor.restarts
            await until(lambda seen=restarts: supervisor.restarts > seen)
            bad.cancel()
            await until(lambda: supervisor.state == "ready")
        await ends
