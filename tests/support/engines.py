"""Supervised engines for tests: start one, fake or real, open streams, know what they must give."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from llmbox.app.engines.engine_process import PrewarmedProcess, SupervisorOptions
from llmbox.app.engines.request_journal import TokenStream
from llmbox.app.engines.supervisor import Supervisor
from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.proc import can_fork
from llmbox.engine.ipc.messages import AddRequest, RequestOutput
from llmbox.engine.ipc.spawn import ForkServer, Launch, SpawnedProcess, _environment
from llmbox.engine.sampling_params import SamplingParams
from support.fake_engine import GO_FILE, expected_tokens, fake_launch, write_model


class ForkedEngines(PrewarmedProcess):
    """Engines of `launch` from one fork server for all tests of this process, as a daemon forks those of all
    its models: importing torch takes longer than most of what such an engine computes.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        """Call it from the main thread: the fork server ends with the thread that starts it."""
        own = launch or Launch()
        super().__init__(own, keep=False)
        self._server = fork_server(own) if can_fork() else None

    async def take(self) -> SpawnedProcess:
        if self._server is None:
            return await super().take()
        return await asyncio.to_thread(self._server.fork)


_servers: dict[tuple[str, ...], tuple[dict[str, str], ForkServer]] = {}


def fork_server(launch: Launch) -> ForkServer:
    """Return the server of this launch and of what it inherits. Of each command only the last one is kept."""
    environ = _environment(launch.env)
    known, server = _servers.get(launch.command, (None, None))
    if server is None or known != environ:
        if server is not None:
            server.close()
        server = ForkServer(launch)
        _servers[launch.command] = environ, server
    return server


def config(directory: Path, name: str = "fake", **options: Any) -> EngineConfig:
    return EngineConfig(model_path=str(write_model(directory / name, **options)), name=name)


@asynccontextmanager
async def supervised(
    directory: Path, *, supervisor: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Supervisor]:
    """A ready supervisor of a fake engine with these `FakeOptions`."""
    settings = SupervisorOptions(launch=fake_launch(), **(supervisor or {}))
    subject = Supervisor(config(directory, **options), settings)
    try:
        await subject.start()
        yield subject
    finally:
        await subject.stop()


def go_on(directory: Path, name: str = "fake") -> None:
    """What `hold_at` holds of the model goes on."""
    (directory / name / GO_FILE).touch()


def request(number: int, max_tokens: int = 64, **changes: Any) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=number)
    return AddRequest(
        **{
            "request_id": f"r{number}",
            "prompt_ids": [number % 250, 1, 2, number // 250],
            "params": params,
            **changes,
        }
    )


def undisturbed(stream: TokenStream) -> list[int]:
    return expected_tokens(stream.request.prompt_ids, stream.request.params)


async def read(stream: TokenStream) -> tuple[list[int], RequestOutput]:
    """All tokens and the last output."""
    tokens: list[int] = []
    last = None
    async for output in stream:
        tokens += output.token_ids
        last = output
    assert last is not None
    return tokens, last


async def read_all(streams: list[TokenStream]) -> list[tuple[list[int], RequestOutput]]:
    async with asyncio.timeout(300):
        return await asyncio.gather(*(read(stream) for stream in streams))


async def assert_undisturbed(streams: list[TokenStream]) -> None:
    for stream, (tokens, last) in zip(streams, await read_all(streams), strict=True):
        assert last.finish_reason == "length", last
        assert tokens == undisturbed(stream)


async def until(condition: Any, seconds: float = 180.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - conditions of any kind
            await asyncio.sleep(0.005)


def kill(supervisor: Supervisor, number: int = signal.SIGKILL) -> None:
    """As an operator would; nothing happens while no process is there."""
    if supervisor.pid is not None:
        os.kill(supervisor.pid, number)


async def stand_still(supervisor: Supervisor) -> None:
    """The engine stops, and what it sent before is here: from now on its numbers hold until SIGCONT."""
    assert supervisor.pid is not None
    stat = Path(f"/proc/{supervisor.pid}/stat")
    kill(supervisor, signal.SIGSTOP)
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    for _ in range(50):
        await asyncio.sleep(0)


def is_running(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
