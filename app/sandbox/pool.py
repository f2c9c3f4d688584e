"""Worker pool of the daemon: few processes, started on demand, killed when they misbehave.

A worker that the CPU alarm ended, or that burnt its time, met a job that is too expensive: an error.
One that died or stopped for another reason is replaced and the job tried once more, all within 2 s.

The processor time of a job is bounded in the worker. Seconds here only find a worker that stands still, so
they are counted in ticks in which it did nothing and could have: it did not wait for a core, a disk or bytes,
and this loop was not late. On a machine that is too slow, 503 says so.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from llmbox.engine.hardware.proc import read_state

from ..errors import ApiError, unavailable
from ..util.threads import FairSlots
from .worker import ATTACHED

ATTEMPT_SECONDS, SECOND_ATTEMPT_SECONDS = 1.2, 0.8
TOTAL_SECONDS = 2.0
START_SECONDS = 10.0
"""Time for a new worker to come up: a tenth of a second, but not on a machine that is short of processors."""
LONGEST_SECONDS = 60.0
"""Longest wait of any kind, also where others have every core."""
_LATE = 1.25
"""Ticks after which a tick counts as late: this loop had other work, so the worker may have waited for it."""
MUCH_CPU = 0.1
"""CPU seconds after which a failed job counts as expensive: ordinary jobs take some milliseconds."""
MOST_WAITING = 2048
"""Jobs that may wait for a worker. One more is refused, unless its caller has less than a fair share."""
WAIT_SECONDS = 30.0
"""Time to wait for a free worker."""
MOST_REPLIES = 32
"""Checked grammars that are kept."""
_TICK = 0.1
_TOO_EXPENSIVE = "it takes too much computing"


class _SlowMachineError(Exception):
    """The worker went on for `LONGEST_SECONDS`, or waited for the machine, and did not end."""


class WorkerPool:
    """Pool that belongs to one event loop. `close` leaves no process behind."""

    def __init__(
        self,
        module: str,
        size: int,
        seconds: tuple[float, ...] = (ATTEMPT_SECONDS, SECOND_ATTEMPT_SECONDS),
        most_per_caller: int = 1,
    ) -> None:
        """Create an empty pool. `module` lies under `llmbox.app.sandbox` and runs as a program
        (`worker.py`). `seconds`: time of each attempt. `most_per_caller`: workers that one caller may have.
        """
        self._module = module
        self._seconds = seconds
        self._slots = FairSlots(size, most_per_caller)
        self._idle: list[Process] = []
        self._busy: set[Process] = set()

    async def answer(self, job: bytes) -> dict[str, Any]:
        """Return the worker's answer, or an object with `error`. Raises ApiError 503 where no worker lasts or
        becomes free in time.
        """
        frame = len(job).to_bytes(4, "little") + job
        return await self.answer_frame(frame)

    async def answer_frame(self, frame: bytes) -> dict[str, Any]:
        """Send an encoded frame (`worker.to_frame`), otherwise like `answer`."""
        async with self._slot(len(frame)):
            for seconds in self._seconds:
                reply = await self._try(frame, seconds)
                if reply is not None:
                    return reply
        raise _no_worker()

    @contextlib.asynccontextmanager
    async def _slot(self, size: int) -> AsyncIterator[None]:
        """Hold a slot for a worker. Raises ApiError 503 where none becomes free in time."""
        if not self._slots.has_room(MOST_WAITING):
            raise workers_busy()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                caller = await self._slots.acquire(size)
        except TimeoutError:
            raise workers_busy() from None
        try:
            yield
        finally:
            self._slots.release(caller)

    async def close(self) -> None:
        for worker in [*self._idle, *self._busy]:
            await _end(worker)
        self._idle.clear()

    async def _worker(self) -> Process:
        if self._idle:
            return self._idle.pop()
        try:
            return await _start(self._module)
        except _SlowMachineError:
            raise _slow_machine() from None
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            raise _no_worker() from None

    async def _try(self, frame: bytes, seconds: float) -> dict[str, Any] | None:
        """Try a job once. None: the worker is gone, for no fault of the job."""
        worker = await self._worker()
        self._busy.add(worker)
        used = _cpu_seconds(worker.pid)
        reply: dict[str, Any] | None = None
        expensive = False
        try:
            reply = await _within(seconds, worker, _exchange(worker, frame))
        except TimeoutError:
            expensive = _cpu_seconds(worker.pid) - used > MUCH_CPU
        except _SlowMachineError:
            raise _slow_machine() from None
        except (OSError, asyncio.IncompleteReadError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOTAL_SECONDS):
                    await _wait_for_exit(worker)
            expensive = worker.returncode == -signal.SIGPROF
        finally:
            self._busy.discard(worker)
            if reply is None:
                await _end(worker)
        if reply is not None:
            self._idle.append(worker)
        return {"error": _TOO_EXPENSIVE} if expensive else reply


async def _spawn(module: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", f"llmbox.app.sandbox.{module}",
        stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH", "TZ", "LANG") if name in os.environ},
        start_new_session=True,
    )  # fmt: skip


async def _start(module: str) -> Process:
    worker = await _spawn(module)
    try:
        await _within(START_SECONDS, worker, _read(worker))
    except BaseException:
        await _end(worker)
        raise
    return worker


async def _within(seconds: float, worker: Process, work: Coroutine[Any, Any, Any]) -> Any:
    """Await `work`. Raises TimeoutError once the worker stood still for so many seconds, _SlowMachineError
    after `LONGEST_SECONDS`.
    """
    task, clock = asyncio.ensure_future(work), asyncio.get_running_loop().time
    left, before = round(seconds / _TICK), _progress(worker)
    try:
        for _ in range(round(LONGEST_SECONDS / _TICK)):
            started = clock()
            done, _ = await asyncio.wait({task}, timeout=_TICK)
            if done:
                return task.result()
            now = _progress(worker)
            is_late = clock() - started > _LATE * _TICK
            left -= 0 if is_late or now != before or _waits_for_machine(worker.pid) else 1
            if left <= 0:
                raise TimeoutError
            before = now
        raise _SlowMachineError
    finally:
        task.cancel()
        await asyncio.wait({task})  # its reader must be free for `_wait_for_exit`


def _progress(worker: Process) -> tuple[float, int]:
    """Return values that change while a worker computes, or reads its job."""
    assert worker.stdin is not None
    return _cpu_seconds(worker.pid), worker.stdin.transport.get_write_buffer_size()


async def _exchange(worker: Process, frame: bytes) -> dict[str, Any]:
    assert worker.stdin is not None
    worker.stdin.write(frame)
    await worker.stdin.drain()
    reply: dict[str, Any] = await _read(worker)
    return reply


async def _read(worker: Process) -> Any:
    assert worker.stdout is not None
    size = int.from_bytes(await worker.stdout.readexactly(4), "little")
    value = json.loads(await worker.stdout.readexactly(size))
    if isinstance(value, dict) and ATTACHED in value:
        value[ATTACHED] = await worker.stdout.readexactly(value[ATTACHED])
    return value


async def _end(worker: Process) -> None:
    if worker.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await _wait_for_exit(worker)


async def _wait_for_exit(worker: Process) -> None:
    """Wait for the end of a worker, and read what it wrote.

    `Process.wait` returns after the end of the output, which asyncio does not see behind bytes that exceed
    the reader's buffer.
    """
    assert worker.stdout is not None
    await asyncio.gather(worker.stdout.read(), worker.wait(), return_exceptions=True)


PDF_SECONDS = 30.0


async def read_pdf(data: bytes) -> dict[str, Any]:
    """Read the text of a PDF in a separate worker. Returns `pages`, `read_pages` and `text`, or `error`."""
    try:
        worker = await _spawn("pdf_worker")
    except OSError:
        raise _no_worker() from None
    try:
        reply, _ = await _within(PDF_SECONDS, worker, worker.communicate(data))
        found: dict[str, Any] = json.loads(reply)
    except _SlowMachineError:
        raise _slow_machine() from None
    except (TimeoutError, ValueError):  # it was ended by a limit
        return {"error": "it takes too much computing"}
    finally:
        await _end(worker)
    return found


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    state = read_state(pid)
    return 0.0 if state is None else state.seconds


def _waits_for_machine(pid: int) -> bool:
    """Return True if the process runs (then its CPU alarm ends it), or waits for a core or a disk."""
    state = read_state(pid)
    return state is not None and state.waits_for_machine


def _no_worker() -> ApiError:
    return _unavailable("its worker stopped. Try again.", "worker_failed", 1)


def _slow_machine() -> ApiError:
    why = f"it took more than {LONGEST_SECONDS:g} s: other programs keep this machine busy. Try again later."
    return _unavailable(why, "machine_busy", 5)


def workers_busy() -> ApiError:
    return _unavailable("too many others wait for the same workers. Try again later.", "workers_busy", 5)


def _unavailable(why: str, code: str, retry_after: int) -> ApiError:
    return unavailable(f"The request could not be prepared: {why}", code, retry_after=retry_after)


def job(template: str, variables: dict[str, Any]) -> bytes:
    return json.dumps({"template": template, "variables": variables}).encode()


class TemplatePool(WorkerPool):
    def __init__(self, size: int = 3) -> None:
        super().__init__("template_worker", size, most_per_caller=size - 1)

    async def render(self, job: bytes) -> str:
        """Render the text of a `job`. Raises ApiError 400 where the template refuses, fails or takes too
        much.
        """
        reply = await self.answer(job)
        if "error" in reply:
            raise _refused(reply["error"])
        return str(reply["text"])


def _refused(reason: str) -> ApiError:
    return ApiError(
        400,
        f"The model's chat template refused these messages: {reason}",
        code="chat_template_error",
        param="messages",
    )


class GrammarPool(WorkerPool):
    def __init__(self) -> None:
        super().__init__("grammar_worker", 1)
        self._replies: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        """Latest replies by digest of the job: agents send the same tools with every request."""

    async def compile_grammars(self, grammars: list[dict[str, Any]], param: str) -> str:
        """Compile grammars for `SamplingParams.grammar`. Raises ApiError 400 with `param` for grammars that
        no text can follow, or that take too much.
        """
        job = json.dumps({"grammars": grammars}).encode()
        digest = hashlib.sha256(job).digest()
        if (reply := self._replies.get(digest)) is None:
            reply = await self.answer(job)
        if "error" in reply:
            why = " ".join(reply["error"].split())
            raise ApiError(
                400, f"No answer can be made to follow '{param}': {why}", code="invalid_grammar", param=param
            )
        self._replies[digest] = reply
        self._replies.move_to_end(digest)
        if len(self._replies) > MOST_REPLIES:
            self._replies.popitem(last=False)
        return reply["grammar"]
