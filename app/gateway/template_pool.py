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
_TOO_EXPENSIVE = "it takes more than 1 s of computing"


class TemplatePool:
    """Owned by one event loop. `close` leaves no process behind."""

    def __init__(self, size: int = 2) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Process] = []
        self._busy: set[Process] = set()

    async def render(self, template: str, variables: dict[str, Any]) -> str:
        """Raises ApiError 400 where the template refuses, fails or takes too much."""
        job = json.dumps({"template": template, "variables": variables}).encode()
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
        deadline = asyncio.get_running_loop().time() + TOTAL_SECONDS
        for _ in range(2):
            seconds = min(ATTEMPT_SECONDS, deadline - asyncio.get_running_loop().time())
            reply = await self._try(job, max(0.1, seconds))
            if reply is not None:
                return reply
        raise ApiError(
            503,
            "The chat template could not be rendered: its worker stopped twice. Try again.",
            code="template_worker_failed",
            type="server_error",
        )

    async def _try(self, job: bytes, seconds: float) -> dict[str, str] | None:
        """None: the worker is gone, for no fault of the template."""
        worker = self._idle.pop() if self._idle else await _start()
        self._busy.add(worker)
        reply: dict[str, str] | None = None
        expensive = False
        try:
            async with asyncio.timeout(seconds):
                reply = await _exchange(worker, job)
        except TimeoutError:
            expensive = _cpu_seconds(worker.pid) > seconds / 2
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
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "llmbox.app.gateway.template_worker",
        stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH", "TZ", "LANG") if name in os.environ},
        start_new_session=True,
    )  # fmt: skip


async def _exchange(worker: Process, job: bytes) -> dict[str, str]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(len(job).to_bytes(4, "little") + job)
    await worker.stdin.drain()
    size = int.from_bytes(await worker.stdout.readexactly(4), "little")
    reply: dict[str, str] = json.loads(await worker.stdout.readexactly(size))
    return reply


async def _end(worker: Process) -> None:
    if worker.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process so far; its start-up counts too, which is short."""
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
