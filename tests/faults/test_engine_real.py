"""The real engine on a tiny random model: killed in the middle, every stream goes on with the same tokens."""

import asyncio
from dataclasses import replace

import pytest

from llmbox.app.engines.engine_process import PrewarmedProcess, SupervisorOptions
from llmbox.app.engines.restart_policy import RestartLimits, WatchLimits
from llmbox.app.engines.supervisor import Supervisor
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import AddRequest, Vocabulary
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.sampling_params import SamplingParams
from support.cpu_quota import cpu_quota
from support.engines import ForkedEngines, kill, read_all, request, until
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow


def asked(number: int, suffix: str) -> AddRequest:
    params = SamplingParams(max_tokens=200, seed=number, temperature=0.0 if number % 2 else 1.0)
    message = request(number, params=params, prompt_ids=[5 + number, 6, 7] * (1 + number))
    return replace(message, request_id=f"r{number}{suffix}")


async def test_what_no_engine_can_compute_ends_alone(tmp_path):
    """Sent past every check of the daemon, eight at once, beside eight streams."""
    make_tiny_model(tmp_path)
    config = EngineConfig(
        model_path=str(tmp_path), name="tiny", device="cpu", memory_bytes=256 << 20, threads=1
    )
    supervisor = Supervisor(config, SupervisorOptions(spares=ForkedEngines()))
    good = SamplingParams(max_tokens=4)
    wrong = [
        *({"prompt_ids": ids} for ids in ([], [-1], [10**6], [2**63])),
        {"output_ids": [10**6]},
        *(
            {"params": replace(good, **p)}
            for p in ({"top_k": 2**40}, {"temperature": -1.0}, {"grammar": "["})
        ),
    ]
    try:
        await supervisor.start()
        supervisor.vocabulary = Vocabulary(data=b"", sizes=[], special=[])
        undisturbed = await read_all([supervisor.submit(asked(i, "a")) for i in range(8)])
        streams = [supervisor.submit(asked(i, "b")) for i in range(8)]
        reading = asyncio.create_task(read_all(streams))
        await until(lambda: len(streams[0].output_ids) > 20)
        bad = [supervisor.submit(request(100 + i, **{"params": good, **w})) for i, w in enumerate(wrong)]
        ends = [last.error_code for _, last in await read_all(bad)]
        assert ends == ["invalid_request"] * 7 + ["grammar_error"]
        assert [t for t, _ in await reading] == [t for t, _ in undisturbed]
        assert (supervisor.restarts, supervisor.state) == (0, "ready")
    finally:
        await supervisor.stop()


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
async def test_killed_in_mid_stream_the_tokens_are_the_same(tmp_path, quant):
    make_tiny_model(tmp_path)
    config = EngineConfig(
        model_path=str(tmp_path), name="tiny", device="cpu", memory_bytes=256 << 20, threads=1, quant=quant
    )
    spares = PrewarmedProcess(Launch(), keep=quant != "none")  # forked, or both started as usual
    options = SupervisorOptions(spares=spares, deaths=RestartLimits(pauses=(0.0,)))
    supervisor = Supervisor(config, options)
    apart = Supervisor(config, SupervisorOptions(spares=ForkedEngines()))
    try:
        await supervisor.start()
        await apart.start()
        undisturbed = await read_all([apart.submit(asked(i, "a")) for i in range(8)])
        streams = [supervisor.submit(asked(i, "b")) for i in range(8)]
        reading = asyncio.create_task(read_all(streams))
        await until(lambda: len(streams[0].output_ids) > 20)
        late = supervisor.submit(asked(0, "c"))  # the others may have ended while we had no processor
        kill(supervisor)
        resumed = await reading
        assert (await read_all([late]))[0][0] == undisturbed[0][0]
        assert supervisor.restarts == 1
        assert all(stream.resumes == 1 for stream in [*streams, late] if stream.resumes or stream is late)
        assert all(len(tokens) == 200 for tokens, _ in resumed)
        assert [tokens for tokens, _ in resumed] == [tokens for tokens, _ in undisturbed]
        await until(lambda: supervisor.stats.blocks_used == 0)
    finally:
        await supervisor.stop()
        await apart.stop()
        spares.close()


@pytest.mark.parametrize("use_cgroup", [True, False])
async def test_with_hardly_any_processor_time_no_engine_is_killed(tmp_path, use_cgroup):
    """A few hundredths of a core: an engine that used none for a second would be given up."""
    make_tiny_model(tmp_path)
    config = EngineConfig(
        model_path=str(tmp_path), name="tiny", device="cpu", memory_bytes=256 << 20, threads=1
    )
    watch = WatchLimits(tick=0.25, stuck_ticks=4, busy_ticks=10**6)
    supervisor = Supervisor(config, SupervisorOptions(watch=watch))
    try:
        await supervisor.start()
        undisturbed = await read_all([supervisor.submit(short(i, "a")) for i in range(4)])
        first = supervisor.pid
        with cpu_quota(first, 0.04, use_cgroup=use_cgroup) as means:
            assert use_cgroup or means == "signals"
            starved = await read_all([supervisor.submit(short(i, "b")) for i in range(4)])
        assert [tokens for tokens, _ in starved] == [tokens for tokens, _ in undisturbed]
        assert (supervisor.restarts, supervisor.pid) == (0, first)
    finally:
        await supervisor.stop()


def short(number: int, suffix: str) -> AddRequest:
    message = asked(number, suffix)
    return replace(message, params=replace(message.params, max_tokens=60))
