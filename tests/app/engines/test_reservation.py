"""Places held while requests are prepared: counted like open requests, and never lost."""

import asyncio

import pytest

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from support.engines import config, request, supervised


async def test_reserved_places_count_until_they_are_released(tmp_path):
    async with supervised(tmp_path, supervisor={"queue_limit": 2}, max_running=1) as supervisor:
        first, second = supervisor.reserve(1), supervisor.reserve(2)
        with pytest.raises(ApiError) as full:
            supervisor.reserve(1)
        assert (full.value.status, full.value.code) == (429, "queue_full")
        assert int(full.value.headers["Retry-After"]) >= 1
        with pytest.raises(ApiError):
            supervisor.submit(request(1))
        first.release()
        first.release()  # counts once
        supervisor.check_room(1)
        with pytest.raises(ApiError):
            supervisor.check_room(2)
        second.release()
        supervisor.check_room(3)


async def test_a_caller_has_room_of_its_own_where_others_fill_the_queue(tmp_path):
    options = {"queue_limit": 6, "queue_per_key": 2}
    async with supervised(tmp_path, supervisor=options, max_running=2, hold_at=0) as supervisor:
        streams = [supervisor.submit(request(number, tenant="flood")) for number in range(8)]
        with pytest.raises(ApiError) as full:
            supervisor.submit(request(8, tenant="flood"))
        assert full.value.code == "queue_full"
        assert "8 of this caller" in full.value.message
        held = supervisor.reserve(1, "quiet")
        quiet = supervisor.submit(request(9, tenant="quiet"))
        with pytest.raises(ApiError):
            supervisor.reserve(1, "quiet")
        held.release()
        supervisor.reserve(1, "quiet").release()
        for stream in (*streams, quiet):
            stream.cancel()
        assert not supervisor._requests.of_tenant
        assert not supervisor._reserved.of_tenant
        supervisor.check_room(8, "flood")


async def test_a_task_that_ends_without_submitting_gives_its_places_back(tmp_path):
    async with supervised(tmp_path, supervisor={"queue_limit": 1}, max_running=1) as supervisor:

        async def prepare(wait: asyncio.Event) -> None:
            supervisor.reserve(2)
            await wait.wait()
            raise ValueError

        task = asyncio.create_task(prepare(asyncio.Event()))
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            supervisor.check_room(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        supervisor.check_room(2)


async def test_nothing_is_reserved_with_a_model_that_is_not_there(tmp_path):
    supervisor = Supervisor(config(tmp_path), SupervisorOptions())
    with pytest.raises(ApiError) as loading:
        supervisor.reserve(1)
    assert (loading.value.status, loading.value.code) == (503, "model_loading")
