"""A pair of real engines on a tiny model: whichever is killed, every stream has the tokens of one engine."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.pair_switch import WAIT_S, WINDOW_S
from llmbox.app.engines.restart_policy import RestartLimits
from llmbox.app.engines.step_times import Interference
from llmbox.app.engines.supervisor import Supervisor
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams
from support.clock import Clock
from support.engines import ForkedEngines, kill, read_all, request, until
from support.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a pair needs two cores"),
]


def asked(number: int, turn: str) -> AddRequest:
    params = SamplingParams(max_tokens=60, seed=number, temperature=float(number % 2), logprobs=2)
    prompt = [(7 * number + 3 * place) % 200 + 5 for place in range(70 + 15 * number)]
    message = request(number, params=params, prompt_ids=prompt)
    return replace(message, request_id=f"r{number}{turn}", cache_namespace=turn)


async def ask(supervisor: Supervisor, turn: str, while_it_runs=None) -> list[list[int]]:
    streams = [supervisor.submit(asked(number, turn)) for number in range(8)]
    reading = asyncio.create_task(read_all(streams))
    if while_it_runs is not None:
        await while_it_runs(streams)
    return [tokens for tokens, _ in await reading]


async def test_whichever_engine_is_killed_the_tokens_are_those_of_one(tmp_path):
    make_tiny_model(tmp_path)
    one = EngineConfig(model_path=str(tmp_path), name="tiny", device="cpu", memory_bytes=512 << 20, threads=1)
    single = Supervisor(one, SupervisorOptions(spares=ForkedEngines()))
    try:
        await single.start()
        expected = await ask(single, "alone")
    finally:
        await single.stop()
    assert all(len(tokens) == 60 for tokens in expected)

    pair = Supervisor(
        replace(one, threads=None, disaggregate=(1, 1)),
        SupervisorOptions(spares=ForkedEngines(), deaths=RestartLimits(pauses=(0.0,))),
    )

    async def kill_prefill(streams):
        await asyncio.sleep(0)
        os.kill(pair.stats.prefill_pid, signal.SIGKILL)

    async def kill_decode(streams):
        await until(lambda: len(streams[0].output_ids) > 5)
        kill(pair)

    try:
        await pair.start()
        assert pair.info.disaggregate == (1, 1)
        assert await ask(pair, "first") == expected
        handed = pair.stats.handed_tokens
        assert handed >= sum(64 + 15 * number for number in range(8)) - 8 * 16
        assert pair.stats.prefill_pid in pair.pids

        os.kill(pair.stats.prefill_pid, signal.SIGSTOP)  # so that it dies with prompts to compute
        assert await ask(pair, "second", kill_prefill) == expected
        assert (pair.stats.prefill_restarts, pair.restarts) == (1, 0)
        assert pair.stats.handed_tokens > handed

        assert await ask(pair, "third", kill_decode) == expected
        assert pair.restarts == 1
        assert await ask(pair, "fourth") == expected
        await until(lambda: pair.stats.blocks_used == 0)
    finally:
        await pair.stop()


async def test_a_prefill_engine_that_dies_with_half_of_the_kv_handed_over_loses_nothing(tmp_path):
    make_tiny_model(tmp_path)
    options = {"device": "cpu", "memory_bytes": 512 << 20, "token_budget": 16, "disaggregate": (1, 1)}
    config = EngineConfig(model_path=str(tmp_path), name="tiny", **options)
    pair = Supervisor(config, SupervisorOptions(spares=ForkedEngines(), deaths=RestartLimits(pauses=(0.0,))))
    missing = sum(70 + 15 * number for number in range(8))
    handed = []

    async def kill_amid_the_hand_over(streams):
        before = pair.stats.handed_tokens
        await until(lambda: pair.stats.handed_tokens > before)
        os.kill(pair.stats.prefill_pid, signal.SIGKILL)
        handed.append(pair.stats.handed_tokens - before)

    try:
        await pair.start()
        expected = await ask(pair, "whole")
        assert pair.stats.prefill_restarts == 0
        for turn in range(3):
            assert await ask(pair, f"half{turn}", kill_amid_the_hand_over) == expected
        assert (pair.stats.prefill_restarts, pair.restarts) == (3, 0)
        assert any(0 < each < missing / 2 for each in handed), handed
        assert pair.stats.handed_damaged == 0
        assert await ask(pair, "after") == expected
        await until(lambda: pair.stats.blocks_used == 0)
    finally:
        await pair.stop()


async def test_one_engine_becomes_a_pair_and_one_again_with_the_same_tokens(tmp_path):
    make_tiny_model(tmp_path)
    clock = Clock()
    auto = EngineConfig(
        model_path=str(tmp_path), name="tiny", device="cpu", memory_bytes=512 << 20, auto_disaggregate=True
    )
    subject = Supervisor(auto, SupervisorOptions(spares=ForkedEngines(), clock=clock))
    uneven = Interference(mixed_steps=100, mixed_seconds=10.0, decode_steps=1000, decode_seconds=20.0, rows=1)

    async def wait_too_long(streams):
        await until(lambda: "at the next moment without requests" in subject.pair_switch.describe())
        clock.now += WAIT_S + 1

    try:
        await subject.start()
        expected = await ask(subject, "alone")
        context = subject.info.context_window
        subject.queue.times.interference = uneven
        assert await ask(subject, "as a pair", wait_too_long) == expected
        await until(lambda: subject.state == "ready")
        assert subject.info.disaggregate is not None
        assert subject.info.context_window == context
        assert await ask(subject, "in the pair") == expected
        assert subject.stats.handed_tokens
        clock.now += WINDOW_S
        rare = [asked(number, "rare") for number in range(8)]
        while subject.info.disaggregate is not None:
            short = [replace(each, request_id=f"{each.request_id}{clock.now}") for each in rare]
            streams = [subject.submit(replace(each, prompt_ids=each.prompt_ids[:40])) for each in short]
            await read_all(streams)
            clock.now += WINDOW_S
            await until(lambda: subject.state == "ready")
        assert await ask(subject, "as one engine") == expected
        assert subject.restarts == 0
    finally:
        await subject.stop()
