"""Turns of callers who want the same few slots."""

import asyncio

import pytest

from llmbox.app.util.threads import TENANT, FairSlots


async def wait_for(slots: FairSlots, caller: str, served: list[str]) -> None:
    TENANT.set(caller)
    async with slots.hold():
        served.append(caller)
        await asyncio.sleep(0)


async def test_callers_take_turns_whatever_they_have_waiting():
    slots, served = FairSlots(1, most_per_caller=1), []
    await asyncio.gather(*(wait_for(slots, caller, served) for caller in "aaaabbc"))
    assert "".join(served) == "abcabaa"
    assert not slots._held
    assert not slots._waiting


async def test_a_caller_has_a_most_also_where_slots_are_free():
    slots = FairSlots(3, most_per_caller=2)
    for _ in range(2):
        await slots.acquire()
    third = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    assert not third.done()
    slots.release("")
    await third


@pytest.mark.parametrize("is_given", [False, True])
async def test_who_stops_waiting_takes_no_slot_along(is_given):
    slots = FairSlots(1, most_per_caller=1)
    holder = await slots.acquire()
    waiting = [asyncio.create_task(slots.acquire()) for _ in range(2)]
    await asyncio.sleep(0)
    if is_given:  # it has its slot, and has not run since
        slots.release(holder)
    waiting[0].cancel()
    if not is_given:
        slots.release(holder)
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    async with asyncio.timeout(60):
        slots.release(await waiting[1])
    assert not slots._held
    assert not slots._waiting


async def test_short_jobs_of_a_caller_go_before_its_long_ones_which_age():
    slots, served = FairSlots(1, most_per_caller=1), []

    async def work(size: int) -> None:
        async with slots.hold(size):
            served.append(size)

    holder = await slots.acquire()
    long = asyncio.create_task(work(10 << 20))
    await asyncio.sleep(0)
    short = [asyncio.create_task(work(100)) for _ in range(3)]
    await asyncio.sleep(0)
    slots.release(holder)
    await asyncio.gather(long, *short)
    assert served == [100, 100, 100, 10 << 20]

    await slots.acquire()
    served.clear()
    long = asyncio.create_task(work(10 << 20))
    for _ in range(200):  # a short job comes before each turn
        short_one = asyncio.create_task(slots.acquire(100))
        await asyncio.sleep(0)
        slots.release("")
        await short_one
        served.append(100)
    assert 50 < served.index(10 << 20) < 100
    await long
