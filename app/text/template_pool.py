"""The daemon's side of the template workers: few processes, made on demand, killed when they misbehave.

A worker that the CPU alarm ended, or that burnt its time, met a template that is too expensive: 400.
One that died or stopped for another reason is replaced and the job tried once more, all within 2 s.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from ..errors import ApiError

ATTEMPT_SECONDS = 1.2
TOTAL_SECONDS = 2.0
START_SECONDS = 10.0
"""For a new worker to come up: a tenth of a second, but not on a machine that is short of processors."""
MUCH_CPU = 0.1
"""Ordinary templates take some milliseconds."""
_TOO_EXPENSIVE = "it takes more than 1 s of computing"


def job(template: str, variables: dict[str, Any]) -> bytes:
    return json.dumps({"template": template, "variables": variables}).encode()


class TemplatePool:
    """Owned by one event loop. `close` leaves no process behind."""

    def __init__(self, size: int = 2) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Process] = []
        self._busy: set[Process] = set()

    async def render(self, job: bytes) -> str:
        """The text of a `job`. Raises ApiError 400 where the template refuses, fails or takes too much."""
        async with self._slots:
            reply = await self._try_twice(job)
        if "error" in reply:
            raise _refused(reply["error"])
        return reply["text"]

    async def close(self) -> None:
        for worker in [*self._idle, *self._busy]:
            await _end(worker)
        self._idle.clear()

    async def _try_twice(self, job: bytes) -> dict[str, str]:
        for seconds in (ATTEMPT_SECONDS, TOTAL_SECONDS - ATTEMPT_SECONDS):
            reply = await self._try(job, seconds)
            if reply is not None:
                return reply
        raise _no_worker()

    async def _worker(self) -> Process:
        if self._idle:
            return self._idle.pop()
        try:
            return await _start()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            raise _no_worker() from None

    async def _try(self, job: bytes, seconds: float) -> dict[str, str] | None:
        """None: the worker is gone, for no fault of the template."""
        worker = await self._worker()
        self._busy.add(worker)
        used = _cpu_seconds(worker.pid)
        reply: dict[str, str] | None = None
        expensive = False
        try:
            async with asyncio.timeout(seconds):
                reply = await _exchange(worker, job)
        except TimeoutError:
            expensive = _cpu_seconds(worker.pid) - used > MUCH_CPU
        except (OSError, asyncio.IncompleteReadError):
            expensive = await worker.wait() == -signal.SIGPROF
        finally:
            self._busy.discard(worker)
            if reply is None:
                await _end(worker)
        if reply is not None:
            self._idle.append(worker)
        return {"error": _TOO_EXPENSIVE} if expensive else reply


async def _start() -> Process:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "llmbox.app.text.template_worker",
        stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH", "TZ", "LANG") if name in os.environ},
        start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_SECONDS):
            await _read(worker)
    except BaseException:
        await _end(worker)
        raise
    return worker


async def _exchange(worker: Process, job: bytes) -> dict[str, str]:
    assert worker.stdin is not None
    worker.stdin.write(len(job).to_bytes(4, "little") + job)
    await worker.stdin.drain()
    reply: dict[str, str] = await _read(worker)
    return reply


async def _read(worker: Process) -> Any:
    assert worker.stdout is not None
    size = int.from_bytes(await worker.stdout.readexactly(4), "little")
    return json.loads(await worker.stdout.readexactly(size))


async def _end(worker: Process) -> None:
    if worker.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _refused(reason: str) -> ApiError:
    return ApiError(
        400,
        f"The model's chat template refused these messages: {reason}",
        code="chat_template_error",
        param="messages",
    )


def _no_worker() -> ApiError:
    return ApiError(
        503,
        "The chat template could not be rendered: its worker stopped. Try again.",
        code="template_worker_failed",
        type="server_error",
        headers={"Retry-After": "1"},
    )
