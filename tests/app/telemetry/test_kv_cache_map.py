"""The draw_map of the KV blocks, and asking an engine for it."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.app.engines.engine_process import EngineQueries
from llmbox.app.telemetry.device_memory import draw_map
from llmbox.engine.ipc.profile_messages import BlockHolder, BlockMap, BlockRun
from support.engines import kill, request, supervised, until

RUNS = st.lists(
    st.builds(
        BlockRun,
        count=st.integers(1, 50),
        state=st.sampled_from(["live", "cached", "free"]),
        owner=st.just(0),
        holders=st.integers(1, 2),
    ),
    min_size=1,
    max_size=20,
)


def block_map(runs):
    return BlockMap(
        block_size=16,
        num_blocks=sum(run.count for run in runs),
        runs=runs,
        owners=["a", "b"],
        holders=[],
        prefixes=[],
        evictions=0,
    )


@given(RUNS, st.integers(1, 200))
def test_a_picture_loses_no_block(runs, most):
    made = draw_map("m", 0.0, block_map(runs), most)
    assert sum(run.count for run in made.cells) <= most
    for state in ("live", "cached"):
        told = sum(run.count * getattr(run, state) for run in made.cells)
        assert told == sum(run.count for run in runs if run.state == state)
    if made.blocks_a_cell == 1:
        states = [run.state for run in made.cells for _ in range(run.count)]
        assert states == [run.state for run in runs for _ in range(run.count)]


def test_one_live_block_of_many_is_seen_with_its_holder():
    runs = [
        BlockRun(count=9, state="cached", owner=1, holders=0),
        BlockRun(count=1, state="live", owner=0, holders=2),
        BlockRun(count=90, state="free", owner=-1, holders=0),
    ]
    first, rest = draw_map("m", 0.0, block_map(runs), 10).cells
    assert (first.state, first.live, first.cached, first.owner, first.holders) == ("live", 1, 9, 0, 2)
    assert (rest.state, rest.count) == ("free", 9)


def test_choices_of_a_request_are_told_under_its_own_id():
    held = [BlockHolder(request_id=f"req.{n}", blocks=5, shared=n) for n in (1, 2)]
    runs = [BlockRun(count=9, state="live", owner=1, holders=2)]
    found = replace(block_map(runs), holders=held, owners=["req.1", "req.2"])
    made = draw_map("m", 0.0, found, 10)
    assert made.owners == ["req", "req"]
    assert made.holders == [BlockHolder(request_id="req", blocks=10, shared=3)]


@pytest.fixture
def patient(monkeypatch):
    """An engine may wait for a core longer than people wait for a map."""
    monkeypatch.setattr(EngineQueries.blocks, "__defaults__", (60.0,))


@pytest.mark.usefixtures("patient")
async def test_several_who_ask_share_one_answer(tmp_path):
    async with supervised(tmp_path, hold_at=20) as supervisor:
        stream = supervisor.submit(request(1, 500))
        await until(lambda: stream.output_ids)
        first, second = await asyncio.gather(supervisor.block_map(), supervisor.block_map())
        assert first is second
        assert first.owners == ["r1"]
        assert first.runs[0].state == "live"


@pytest.mark.usefixtures("patient")
async def test_who_asks_an_engine_that_dies_is_answered(tmp_path):
    async with supervised(tmp_path) as supervisor:
        asking = asyncio.create_task(supervisor.block_map())
        kill(supervisor)
        async with asyncio.timeout(90):
            await asking
            await until(lambda: supervisor.state == "ready" and supervisor.restarts == 1)
            assert (await supervisor.block_map()) is not None
