"""The real engine on a tiny random model: killed in the middle, every stream goes on with the same tokens."""

import asyncio
from dataclasses import replace

import pytest

from llmbox.app.engines.deaths import DeathLimits
from llmbox.app.engines.supervisor import Supervisor, SupervisorOptions
from llmbox.engine.config import EngineConfig
from llmbox.engine.messages import AddRequest
from llmbox.engine.sampling import SamplingParams
from support.engines import kill, read_all, request, until
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow


def asked(number: int, suffix: str) -> AddRequest:
    params = SamplingParams(max_tokens=200, seed=number, temperature=0.0 if number % 2 else 1.0)
    message = request(number, params=params, prompt_ids=[5 + number, 6, 7] * (1 + number))
    return replace(message, request_id=f"r{number}{suffix}")


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
async def test_killed_in_mid_stream_the_tokens_are_the_same(tmp_path, quant):
    make_tiny_model(tmp_path)
    config = EngineConfig(
        model_path=str(tmp_path), name="tiny", device="cpu", memory_bytes=256 << 20, threads=1, quant=quant
    )
    supervisor = Supervisor(config, SupervisorOptions(deaths=DeathLimits(pauses=(0.0,))))
    try:
        await supervisor.start()
        undisturbed = await read_all([supervisor.submit(asked(i, "a")) for i in range(8)])
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
