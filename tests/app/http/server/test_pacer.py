"""A burst starts a few requests a turn of the loop, in order; what else is ready gets each turn too."""

import asyncio
from itertools import pairwise

from llmbox.app.http.server.middleware import PER_TURN, RequestPacer


async def test_a_burst_is_spread_over_turns_in_order():
    pacer, started, turns = RequestPacer(), [], []

    async def request(number: int) -> None:
        await pacer.turn()
        started.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(100)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turns.append(len(started))
    assert started == list(range(100))
    assert max(after - before for before, after in pairwise(turns)) <= PER_TURN


async def test_a_few_requests_do_not_wait():
    pacer = RequestPacer()
    for _ in range(3):
        waits = [pacer.turn() for _ in range(PER_TURN)]
        for wait in waits:
            try:
                wait.send(None)
            except StopIteration:
                continue
            raise AssertionError("it waited")
        await asyncio.sleep(0)


async def test_clients_that_leave_take_no_turns():
    pacer = RequestPacer()
    tasks = [asyncio.create_task(pacer.turn()) for _ in range(10 * PER_TURN)]
    await asyncio.sleep(0)
    for task in tasks[PER_TURN:-1]:
        task.cancel()
    await tasks[-1]
    await asyncio.sleep(0)
    await pacer.turn()
