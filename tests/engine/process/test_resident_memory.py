"""What an engine process takes beside weights and KV: at most 300 MB (docs/notes/start-and-memory.md)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc import messages as m
from llmbox.engine.ipc.client import EngineClient
from llmbox.engine.ipc.spawn import Launch, spawn
from support.engines import request
from support.tiny_models import make_tiny_model

BESIDE = 300_000_000
PATIENCE = 120


def resident(pid: int) -> int:
    """Bytes of RAM, with its share of what other processes map too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells")
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there CUDA's part of PyTorch is imported too")
async def test_an_engine_takes_little_beside_weights_and_kv(tmp_path: Path) -> None:
    place = make_tiny_model(tmp_path / "m", tokenizer=False)
    heard: asyncio.Queue[Any] = asyncio.Queue()
    client = EngineClient(heard.put_nowait, lambda _line: None)
    config = EngineConfig(model_path=str(place), name="m", device="cpu", kv_tokens=512, threads=1)
    await client.adopt(spawn(Launch()), config)
    try:
        async with asyncio.timeout(PATIENCE):
            while not isinstance(ready := await heard.get(), m.Ready):
                assert not isinstance(ready, m.LoadFailed)
            client.send(request(1, 4))
            while not isinstance(await heard.get(), m.StepOutputs):
                pass
        assert resident(client.pid) <= ready.info.weights_bytes + ready.info.kv_bytes + BESIDE
    finally:
        await client.stop(5.0)
