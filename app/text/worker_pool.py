"""The daemon's side of workers: few processes, made on demand, killed when they misbehave.

A worker that the CPU alarm ended, or that burnt its time, met a job that is too expensive: an error.
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
"""Ordinary jobs take some milliseconds."""
_TOO_EXPENSIVE = "it takes more than 1 s of computing"


class WorkerPool:
    """Owned by one event loop. `close` leaves no process behind."""

    def __init__(self, module: str, size: int) -> None:
        """`module`: under `llmbox.app.text`, run as a program (`worker.py`)."""
        self._module = module
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Process] = []
        self._busy: set[Process] = set()

    async def answer(self, job: bytes) -> dict[str, str]:
        """The worker's answer, with `error` where it has none. Raises ApiError 503 where no worker lasts."""
        async with self._slots:
            for seconds in (ATTEMPT_SECONDS, TOTAL_SECONDS - ATTEMPT_SECONDS):
                reply = await self._try(job, seconds)
                if reply is not None:
                    return reply
        raise _no_worker()

    async def close(self) -> None:
        for worker in [*self._idle, *self._busy]:
            await _end(worker)
        self._idle.clear()

    async def _worker(self) -> Process:
        if self._idle:
            return self._idle.pop()
        try:
            return await _start(self._module)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            raise _no_worker() from None

    async def _try(self, job: bytes, seconds: float) -> dict[str, str] | None:
        """None: the worker is gone, for no fault of the job."""
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


async def _start(module: str) -> Process:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", f"llmbox.app.text.{module}",
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


def _no_worker() -> ApiError:
    return ApiError(
        503,
        "The request could not be prepared: its worker stopped. Try again.",
        code="worker_failed",
        type="server_error",
        headers={"Retry-After": "1"},
    )
