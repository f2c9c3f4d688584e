import asyncio
import gc
import weakref
from typing import Any

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.http.server.errors import ClientGone
from llmbox.app.http.server.sse import ended_by_disconnect, while_connected


def receiver(left: asyncio.Event) -> Any:
    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    return receive


async def test_the_result_of_the_work() -> None:
    async def work() -> int:
        return 3

    assert await while_connected(receiver(asyncio.Event()), work()) == 3


async def test_the_error_of_the_work() -> None:
    async def work() -> None:
        raise ApiError(400, "no")

    with pytest.raises(ApiError):
        await while_connected(receiver(asyncio.Event()), work())


async def test_leaving_cancels_the_work_before_it_returns() -> None:
    left, begun, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    waiting = asyncio.create_task(while_connected(receiver(left), work()))
    await begun.wait()
    left.set()
    with pytest.raises(ClientGone):
        await waiting
    assert ended.is_set()


async def test_cancelling_cancels_the_work() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    waiting = asyncio.create_task(while_connected(receiver(asyncio.Event()), work()))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_leaving_ends_a_block_in_its_own_task() -> None:
    left, begun = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        async with ended_by_disconnect(receiver(left)):
            begun.set()
            await asyncio.sleep(60)

    waiting = asyncio.create_task(wait())
    await begun.wait()
    left.set()
    with pytest.raises(ClientGone):
        await waiting
    assert not waiting.cancelling()


async def test_a_block_that_ends_in_time_or_is_cancelled_keeps_its_end() -> None:
    left, begun = asyncio.Event(), asyncio.Event()
    async with ended_by_disconnect(receiver(left)):
        await asyncio.sleep(0)
    left.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    async def wait() -> None:
        async with ended_by_disconnect(receiver(asyncio.Event())):
            begun.set()
            await asyncio.sleep(60)

    waiting = asyncio.create_task(wait())
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_error_keeps_nothing_of_the_work() -> None:
    """Without the garbage collector: a full collection is rare, and a request's body may be large."""

    class Body:
        pass

    async def work(body: Body) -> None:
        raise ApiError(400, f"no {body}")

    async def fail() -> weakref.ref[Body]:
        body = Body()
        try:
            await while_connected(receiver(asyncio.Event()), work(body))
        except ApiError:
            return weakref.ref(body)
        raise AssertionError

    gc.disable()
    try:
        kept = await fail()
        await asyncio.sleep(0)  # the watch of the connection ends
        assert kept() is None
    finally:
        gc.enable()
