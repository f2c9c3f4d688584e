"""Work without a connection: found by its owner, cancelled, and given its time when the daemon stops."""

import asyncio

import pytest

from llmbox.app.lifecycle.drain import BackgroundTasks, Drain
from support.cli_box import PATIENCE

PLACE = ("key_1", "resp-1")


class Work:
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.end = ""

    async def run(self) -> None:
        try:
            await self.go.wait()
            self.end = "done"
        except asyncio.CancelledError:
            self.end = "cancelled"
            raise


async def started(background: BackgroundTasks) -> Work:
    work = Work()
    background.start(PLACE, work.run(), lambda: "so far")
    await asyncio.sleep(0)
    return work


async def test_it_is_looked_at_under_its_own_name_until_it_ends():
    background = BackgroundTasks()
    work = await started(background)
    assert background.look(PLACE) == "so far"
    assert background.look(("key_2", "resp-1")) is None
    await background.cancel(("key_2", "resp-1"))
    work.go.set()
    for _ in range(3):  # its own step, then its call-back
        await asyncio.sleep(0)
    assert (work.end, background.look(PLACE)) == ("done", None)


async def test_a_cancelled_one_has_ended_when_that_returns():
    background = BackgroundTasks()
    work = await started(background)
    await background.cancel(PLACE)
    assert (work.end, background.look(PLACE)) == ("cancelled", None)


@pytest.mark.parametrize(
    ("patience", "hurried", "end"),
    [(PATIENCE, False, "done"), (0, False, "cancelled"), (PATIENCE, True, "cancelled")],
)
async def test_a_drain_gives_it_time_until_it_is_hurried(patience, hurried, end):
    background, drain = BackgroundTasks(), Drain()
    work = await started(background)
    finishing = asyncio.create_task(background.finish(drain, patience))
    drain.begin()
    if hurried:
        drain.begin()
    elif end == "done":
        work.go.set()
    await asyncio.wait_for(finishing, PATIENCE)
    assert (work.end, background.look(PLACE)) == (end, None)


async def test_a_drain_with_nothing_to_wait_for_ends_at_once():
    drain = Drain()
    drain.begin()
    await asyncio.wait_for(BackgroundTasks().finish(drain, 10 * PATIENCE), PATIENCE)


async def test_one_that_is_cancelled_before_its_first_step_runs_up_to_its_own_end():
    background, work = BackgroundTasks(), Work()
    background.start(PLACE, work.run(), lambda: "so far")
    await background.cancel(PLACE)
    assert (work.end, background.look(PLACE)) == ("cancelled", None)


async def test_the_end_of_one_forgets_no_other_of_its_name():
    background, first, second = BackgroundTasks(), Work(), Work()
    background.start(PLACE, first.run(), lambda: "first")
    first.go.set()
    await asyncio.sleep(0)  # its own step; its call-back comes next
    assert first.end == "done"
    background.start(PLACE, second.run(), lambda: "second")
    await asyncio.sleep(0)
    assert background.look(PLACE) == "second"
    await background.close()
    assert (second.end, background.look(PLACE)) == ("cancelled", None)
