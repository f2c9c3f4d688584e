import asyncio
import threading

import pytest

from llmbox.app.telemetry.telemetry import TimedOut, TimedReader


async def test_a_result_comes_through_and_so_does_an_exception():
    guarded: TimedReader[int] = TimedReader("test", 5.0)
    assert await guarded.read(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await guarded.read(lambda: 1 // 0)
    assert await guarded.read(lambda: 8) == 8


async def test_a_stuck_call_costs_one_time_out_and_nothing_piles_up_behind_it():
    release = threading.Event()
    calls = []

    def hang() -> int:
        calls.append(1)
        release.wait(30)
        return 1

    guarded: TimedReader[int] = TimedReader("test", 0.05)
    assert isinstance(await guarded.read(hang), TimedOut)
    guarded._timeout = 3600.0
    for _ in range(100):  # answered at once, not after a time-out each
        assert isinstance(await guarded.read(hang), TimedOut)
    assert calls == [1]
    release.set()
    async with asyncio.timeout(60):
        while isinstance(result := await guarded.read(lambda: 2), TimedOut):  # noqa: ASYNC110 - a thread ends when it ends
            await asyncio.sleep(0.01)
    assert result == 2, "the late result of the stuck call is thrown away"
