"""One supervised engine without faults: streams, limits, cancel, load failures. Faults: tests/faults."""

import asyncio
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.request_journal import RequestJournal
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from llmbox.engine.ipc.messages import (
    AbortRequest,
    AddRequest,
    EngineStats,
    KeepImages,
    PreparedImage,
    RequestOutput,
    StepOutputs,
)
from llmbox.engine.ipc.sequence_times import SequenceTimes
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.sampling_params import SamplingParams
from support.engines import (
    assert_undisturbed,
    config,
    go_on,
    is_running,
    kill,
    read,
    read_all,
    request,
    stand_still,
    supervised,
    undisturbed,
    until,
)
from support.fake_engine import fake_launch


async def test_streams_give_their_tokens(tmp_path):
    states = []
    options = {"on_change": lambda s: states.append(s.state)}
    async with supervised(tmp_path, supervisor=options) as supervisor:
        assert supervisor.state == "ready"
        assert supervisor.info.vocab_size == 256
        await assert_undisturbed([supervisor.submit(request(i)) for i in range(100)])
        assert supervisor.open_requests == 0
    assert states == ["ready", "stopped"]


async def test_a_refused_request_ends_with_the_engines_reason(tmp_path):
    async with supervised(tmp_path) as supervisor:
        _, last = await read(supervisor.submit(request(1, max_tokens=5000)))
        assert (last.finish_reason, last.error_code) == ("error", "does_not_fit")


async def test_a_stop_whose_caller_leaves_at_once_leaves_no_process(tmp_path):
    """Seed 22617 of the simulator: the caller of an unload left before the engine was told to end."""
    async with supervised(tmp_path) as supervisor:
        pid = supervisor.pid
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await until(lambda: not is_running(pid))


async def test_cancel_frees_at_once_and_disturbs_nobody(tmp_path):
    async with supervised(tmp_path, step_delay=0.005, max_running=4, hold_at=50) as supervisor:
        streams = [supervisor.submit(request(i, 100)) for i in range(8)]
        await until(lambda: streams[0].output_ids)
        await stand_still(supervisor)
        for stream in streams[1::2]:  # two running, two queued
            stream.cancel()
            stream.cancel()
        left = [stream.output_ids[:] for stream in streams[1::2]]
        kill(supervisor, signal.SIGCONT)
        await until(lambda: supervisor.stats.running + supervisor.stats.waiting == 4)
        go_on(tmp_path)
        for _, last in await read_all(streams[1::2]):
            assert last.finish_reason == "abort"
        await assert_undisturbed(streams[0::2])
        await until(lambda: supervisor.stats.blocks_used == 0)
        # Each of the two that ran had a step under way, and no more of them.
        assert supervisor.stats.output_tokens <= 4 * 100 + sum(map(len, left)) + 2


async def test_leaving_the_block_cancels(tmp_path):
    async with supervised(tmp_path, step_delay=0.005) as supervisor:
        with supervisor.submit(request(1, 4000)) as stream:
            await anext(stream)
        assert stream.finished
        assert supervisor.open_requests == 0
        await until(lambda: supervisor.stats.running == 0)


async def test_a_burst_of_10_000_keeps_every_accepted_request(tmp_path):
    async with supervised(tmp_path, supervisor={"queue_limit": 512}, max_running=64) as supervisor:
        accepted, refused = [], []
        for i in range(10_000):
            try:
                accepted.append(supervisor.submit(request(i, 5)))
            except ApiError as error:
                refused.append(error)
        assert len(accepted) == 512 + 64
        assert {(e.status, e.code) for e in refused} == {(429, "queue_full")}
        assert all(int(e.headers["Retry-After"]) >= 1 for e in refused)
        await assert_undisturbed(accepted)
        await assert_undisturbed([supervisor.submit(request(20_000))])


async def test_room_for_several_at_once(tmp_path):
    async with supervised(tmp_path, supervisor={"queue_limit": 2}, max_running=1) as supervisor:
        supervisor.check_room(3)
        with pytest.raises(ApiError):
            supervisor.check_room(4)


@pytest.mark.parametrize(
    ("options", "status", "code", "text"),
    [
        ({"load_error": ("bad_model", "config.json is missing")}, 400, "bad_model", "config.json is missing"),
        ({"load_error": ("does_not_fit", "need 5")}, 400, "does_not_fit", "need 5"),
        (
            {"load_error": ("rank_lost", "rank 1 was killed while loading")},
            500,
            "rank_lost",
            "The engine of fake ended while loading: rank 1 was killed while loading.",
        ),
        ({"load_crash": True}, 500, "engine_error", "told to crash"),
    ],
)
async def test_a_failing_load_is_an_error_and_leaves_nothing(tmp_path, options, status, code, text):
    supervisor = Supervisor(config(tmp_path, **options), SupervisorOptions(launch=fake_launch()))
    with pytest.raises(ApiError, match=text) as failed:
        await supervisor.start()
    assert (failed.value.status, failed.value.code) == (status, code)
    assert supervisor.pid is None
    assert supervisor.state == "failed"
    await supervisor.stop()


async def test_what_cannot_be_spawned_is_an_error(tmp_path):
    launch = Launch(command=("/nowhere/python",))
    supervisor = Supervisor(config(tmp_path), SupervisorOptions(launch=launch))
    with pytest.raises(ApiError):
        await supervisor.start()


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_supervision_that_raises_while_loading_ends_the_start(tmp_path, fails):
    """It raises before there is a process, or when the engine has ended: `start` waits in neither case."""

    def fail(*_):
        raise RuntimeError("told to fail")

    options = SupervisorOptions(launch=fake_launch(), on_change=fail)
    if fails == "before":
        options = SupervisorOptions(spares=SimpleNamespace(take=fail))
    supervisor = Supervisor(config(tmp_path, load_crash=True), options)
    with pytest.raises(ApiError, match="an internal error") as failed:
        async with asyncio.timeout(60):
            await supervisor.start()
    assert (failed.value.status, failed.value.code) == (500, "engine_error")
    await asyncio.wait({supervisor._task})
    assert supervisor.state == "failed"
    assert supervisor.pid is None


async def test_loading_refuses_requests_and_can_be_stopped(tmp_path):
    supervisor = Supervisor(config(tmp_path, load_delay=30), SupervisorOptions(launch=fake_launch()))
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: supervisor.progress is not None)
    with pytest.raises(ApiError) as refused:
        supervisor.submit(request(1))
    assert (refused.value.status, refused.value.code) == (503, "model_loading")
    assert "Retry-After" in refused.value.headers
    await supervisor.stop()
    with pytest.raises(ApiError):
        await starting
    assert supervisor.pid is None


async def test_forks_keep_their_sibling_only_where_it_is(tmp_path):
    async with supervised(tmp_path, step_delay=0.005) as supervisor:
        parent = supervisor.submit(request(1, 40))
        child = supervisor.submit(request(2, 60, fork_of="r1"))
        stray = supervisor.submit(request(3, 5, fork_of="unknown"))
        assert child.message({"r1"}).fork_of == "r1"
        assert child.message(set()).fork_of is None
        await until(lambda: child.output_ids)
        kill(supervisor)
        await assert_undisturbed([parent, child, stray])


def test_a_picture_is_sent_once_for_all_its_requests():
    """Again to a new engine, and no longer kept there once nobody asks about it."""
    sent: list[object] = []
    journal = RequestJournal(sent.append, on_empty=list, on_finish=list)
    image = PreparedImage(content_hash=b"h", tiles=[(1, 1)], pixels=b"rgb")
    streams = [journal.add(request(number, images=[image]), hand_over=True) for number in range(3)]
    assert [type(message) for message in sent] == [KeepImages, *[AddRequest] * 3]
    assert sent[0].images == [image]
    assert all(message.images == [replace(image, pixels=b"")] for message in sent[1:])
    sent.clear()
    journal.engine_died(from_outside=True)
    streams[0].cancel()
    assert not sent
    journal.engine_ready()
    assert [type(message) for message in sent] == [KeepImages, AddRequest, AddRequest]
    assert sent[0].images == [image]
    sent.clear()
    journal.deliver(RequestOutput(request_id="r1", finish_reason="stop"))
    assert not sent
    streams[2].cancel()
    assert sent == [KeepImages(drop=[b"h"]), AbortRequest(request_id="r2")]


def test_suspects_that_have_all_left_hold_nobody_back():
    """They were still on trial for the next engine, which nobody could end: later requests waited on."""
    sent: list[object] = []
    journal = RequestJournal(sent.append, on_empty=list, on_finish=list)
    streams = [journal.add(request(number), hand_over=True) for number in range(2)]
    journal.engine_died(from_outside=False)
    journal.engine_ready()
    streams[0].cancel()  # the engine dies before it has confirmed that
    journal.engine_died(from_outside=False)
    streams[1].cancel()
    journal.engine_ready()
    sent.clear()
    journal.add(request(2), hand_over=True)
    assert [message.request_id for message in sent] == ["r2"]


def test_a_recalled_request_goes_on_later_as_if_nothing_had_been():
    """After a death in company each suspect is tried alone; one that passed is sent again after the trial."""
    sent: list[object] = []
    journal = RequestJournal(sent.append, on_empty=list, on_finish=list)
    streams = [journal.add(request(number), hand_over=True) for number in range(3)]
    for _ in range(2):
        journal.engine_died(from_outside=False)
        journal.engine_ready()
    journal.deliver(RequestOutput(request_id="r2", token_ids=[1, 2]))
    assert journal.engine_died(from_outside=False) is None
    assert journal.detector.narrowed
    sent.clear()
    journal.engine_ready()
    journal.deliver(RequestOutput(request_id="r1", token_ids=[3, 4]))
    assert [type(message) for message in sent] == [AddRequest, AbortRequest]
    times = {"r1": SequenceTimes(arrived_at=0.0, ended_at=1.0)}
    recalled = RequestOutput(request_id="r1", finish_reason="abort")
    journal.deliver_step(StepOutputs(outputs=[recalled], stats=EngineStats(), times=times))
    assert (streams[1].finished, streams[1].times) == (False, None)
    assert sent[-1].request_id == "r2"
    journal.deliver(RequestOutput(request_id="r2", token_ids=[3, 4]))
    journal.deliver(RequestOutput(request_id="r2", finish_reason="abort"))
    journal.deliver(RequestOutput(request_id="r0", token_ids=[1, 2]))  # the last one: it stays
    assert [message.request_id for message in sent[-2:]] == ["r1", "r2"]
    assert sent[-2].output_ids == [3, 4]
    assert not any(stream.finished for stream in streams)


async def test_first_facts_are_told_once_even_across_a_death(tmp_path):
    async with supervised(tmp_path, step_delay=0.005, hold_at=200) as supervisor:
        params = SamplingParams(max_tokens=300, prompt_logprobs=1, logprobs=0)
        stream = supervisor.submit(request(1, params=params))
        assert stream.message(()).params == params
        first = await anext(stream)
        # The next engine is not asked again: it would compute the whole prompt instead of using its cache.
        assert stream.message(()).params == replace(params, prompt_logprobs=None)
        assert len(first.prompt_logprobs) == len(stream.request.prompt_ids)
        assert first.cached_tokens == 0
        kill(supervisor)
        go_on(tmp_path)
        rest = [output async for output in stream]
        assert stream.resumes == 1
        assert all(o.prompt_logprobs is o.cached_tokens is o.scheduled_at is None for o in rest)
        assert stream.output_ids == undisturbed(stream)
        assert sum(len(o.logprobs) for o in [first, *rest]) == 300


async def test_stop_ends_streams_with_a_reason(tmp_path):
    async with supervised(tmp_path, step_delay=0.01) as supervisor:
        stream = supervisor.submit(request(1, 4000))
        await anext(stream)
        await supervisor.stop()
        _, last = await read(stream)
        assert (last.finish_reason, last.error_code) == ("error", "model_unloaded")
        with pytest.raises(ApiError) as refused:
            supervisor.submit(request(2))
        assert refused.value.status == 503
