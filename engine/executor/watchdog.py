"""Watchdog for workers: ends the engine as soon as a rank dies, is stopped or hangs.

A thread of rank 0. Between steps it sleeps until a worker ends; during steps it samples all ranks each
second. The engine ends as the rank did: with SIGKILL if the rank was killed or stopped from outside, so that
no open request is blamed, else with an error code. The daemon's supervisor restarts it either way.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ..errors import RankLost
from ..hardware.proc import read_state
from .workers import Worker

TICK: Final = 1.0
STOPPED_TICKS: Final = 5
"""Ticks for which a rank may be in state T (SIGSTOP) during one step."""
STILL_TICKS: Final = 30
"""Ticks of one step in which no rank uses the CPU. On GPUs this is the only check for hangs: NCCL's own
watchdog (`torch_communicator.STUCK_SECONDS`) does not see collectives inside CUDA graphs."""
_IDLE_TICKS: Final = 2
# Hundredths of a second of CPU time that a waiting rank uses: NCCL's threads poll, and so does this one.
_CRASHED: Final = 70
_EXPLANATION_SECONDS: Final = 1.0
_LOST_SECONDS: Final = 15.0
"""Time between the end of a worker's socket and of its process, which may have to wait for a free core."""
_FOLLOWERS_SECONDS: Final = 0.05
# Ranks that wait for a dead one end as well: this delay lets all exit codes arrive, to report the cause.

log = logging.getLogger("llmbox.engine")


def end_process(reason: str, *, from_outside: bool) -> None:
    log.error("the engine ends: %s", reason)
    if from_outside:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(_CRASHED)


class WorkerWatchdog:
    """Thread that watches the worker processes."""

    def __init__(
        self, workers: list[Worker], end: Callable[..., None] = end_process, tick: float = TICK
    ) -> None:
        """`end(reason, from_outside=...)` is called once, from the watching thread."""
        self._ranks = {worker.process.pid: worker.rank for worker in workers}
        self._processes = {os.pidfd_open(worker.process.pid): worker for worker in workers}
        self._end = end
        self._tick = tick
        self._steps = 0
        self._running = False
        self._asleep = True
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Guards `_running` and `_asleep`: no step may begin unnoticed while the thread goes to sleep."""
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="watch ranks", daemon=True)
        self._thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        with self._lock:
            self._steps += 1
            self._running = True
            asleep, self._asleep = self._asleep, False
        if asleep:
            os.eventfd_write(self._wake, 1)
        try:
            yield
        finally:
            self._running = False

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Mark a step as running, and let the watchdog end the engine if it fails because a rank is gone."""
        with self.step():
            try:
                yield
            except RankLost:
                self._thread.join(_LOST_SECONDS)
                raise
            except Exception:
                self.wait_for_end()
                raise

    def wait_for_end(self) -> None:
        """Give the watchdog time to end the engine; return after a second where no rank has ended."""
        self._thread.join(_EXPLANATION_SECONDS)

    def close(self) -> None:
        """Stop watching: workers that end from now on do so intentionally."""
        if not self._closing.is_set():
            self._closing.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            for fd in (*self._processes, self._wake):
                os.close(fd)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self._processes, self._wake):
            poll.register(fd, select.POLLIN)
        before = _HealthSample(self.current_step, self._ranks)
        while True:
            ready = [fd for fd, _ in poll.poll(None if self._asleep else self._tick * 1000)]
            ended = [self._processes[fd] for fd in ready if fd in self._processes]
            if self._closing.is_set():
                return
            if ended:
                time.sleep(_FOLLOWERS_SECONDS)
                self._ended()
                return
            if ready:
                os.eventfd_read(self._wake)
                continue
            look = _HealthSample(self.current_step, self._ranks)
            look.follow(before)
            if problem := look.problem:
                self._end(problem, from_outside=look.stopped > 0)
                return
            with self._lock:
                self._asleep = not self._running and before.step is None
            before = look

    def _ended(self) -> None:
        codes = {w.rank: code for w in self._processes.values() if (code := w.process.poll()) is not None}
        # The cause is a killed rank first, then a failed one.
        rank, code = min(codes.items(), key=lambda one: (one[1] != -signal.SIGKILL, one[1] == 0, one[0]))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._end(f"rank {rank} {how}", from_outside=code == -signal.SIGKILL)

    @property
    def current_step(self) -> int | None:
        return self._steps if self._running else None


class _HealthSample:
    """Process states of all ranks at one tick, and for how many ticks in a row something has been wrong."""

    def __init__(self, step: int | None, ranks: dict[int, int]) -> None:
        """`ranks`: worker ranks by process id."""
        self.step = step
        states = {rank: read_state(pid) for pid, rank in {os.getpid(): 0, **ranks}.items()}
        self._ranks = len(states)
        known = {rank: state for rank, state in states.items() if state is not None}
        self._stopped = [rank for rank, state in known.items() if state.is_stopped]
        self._waits_for_machine = any(state.waits_for_machine for state in known.values())
        self._used = sum(state.ticks for state in known.values())
        self.stopped = self.still = 0

    def follow(self, before: "_HealthSample") -> None:
        """Continue the counts of the previous sample where the step is still the same."""
        if self.step is None or self.step != before.step:
            return
        if self._stopped:
            self.stopped = before.stopped + 1
        idle = self._used <= before._used + _IDLE_TICKS * self._ranks  # noqa: SLF001 - the same class
        if idle and not self._waits_for_machine:
            self.still = before.still + 1

    @property
    def problem(self) -> str:
        if self.stopped >= STOPPED_TICKS:
            return f"rank {', '.join(map(str, self._stopped))} was stopped"
        if self.still >= STILL_TICKS:
            return "no rank has used the processor for a while in one step"
        return ""
