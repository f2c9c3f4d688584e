"""Restart policy: how often an engine may die, the delay before each restart, and the retry of a failed
model; the watchdog that finds a hung engine.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.proc import (
    bytes_from_disk,
    family_of,
    read_state,
    thread_states,
    waits_for_file_lock,
)

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = logging.getLogger("llmbox.engines")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits of restarts. Times in seconds."""

    deaths: int = 5
    window: float = 60.0
    pauses: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    """Delay before the restart after the first, second… death in the window. The last one repeats."""
    max_forgiven: int = 3
    """Poison requests found in the window, beyond those that passed a trial and since one was finished, that
    reset the count of deaths. More are not forgiven: poison requests must not end the model, but a machine
    on which every request is fatal must.
    """
    cooldown: float = 30.0
    """Delay before one start of an engine that died too often is tried. Each failure doubles it. 0: never."""
    longest_cooldown: float = 900.0


async def keep_config(config: EngineConfig, on_request: bool = False) -> EngineConfig:
    """Admit a model without a memory budget."""
    del on_request
    return config


class RestartPolicy:
    """Count of deaths inside a sliding window of the monotonic clock."""

    def __init__(self, limits: RestartLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._times: deque[float] = deque()
        self._convictions: deque[float] = deque()

    def __len__(self) -> int:
        _forget_before(self._times, self._clock() - self._limits.window)
        return len(self._times)

    def add(self) -> None:
        self._times.append(self._clock())

    def forgive(self, proven: int) -> None:
        """Forget the deaths that a poison request caused: it is gone, and the engine is not to blame.

        `proven` is the number of requests that passed a trial.
        """
        now = self._clock()
        _forget_before(self._convictions, now - self._limits.window)
        self._convictions.append(now)
        if len(self._convictions) <= self._limits.max_forgiven + proven:
            self._times.clear()

    def note_finish(self) -> None:
        """Note that the engine has finished a request: not every one is fatal."""
        self._convictions.clear()

    def clear(self) -> None:
        self._times.clear()

    @property
    def too_many(self) -> bool:
        return len(self) >= self._limits.deaths

    @property
    def pause(self) -> float:
        pauses = self._limits.pauses
        return pauses[min(max(len(self), 1), len(pauses)) - 1]


class RestartBreaker:
    """Circuit breaker of an engine: open while the engine is given up, half-open while one start is tried."""

    def __init__(self, limits: RestartLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._openings = 0
        """Consecutive openings since the engine last ran for longer than the longest cool-down."""
        self._closed_at: float | None = None
        self._next_try: float | None = None

    def open(self) -> float | None:
        """Open the breaker. Returns the seconds until the next start may be tried; None for never."""
        limits, now = self._limits, self._clock()
        if not limits.cooldown:
            return None
        if self._closed_at is not None and now - self._closed_at > limits.longest_cooldown:
            self._openings = 0
        self._closed_at = None
        # Bounded: two to the power of a year's failures overflows a float.
        doublings = min(self._openings, 64)
        self._openings += 1
        wait = min(limits.cooldown * 2.0**doublings, max(limits.cooldown, limits.longest_cooldown))
        self._next_try = now + wait
        return wait

    def close(self) -> None:
        """Close the breaker: the engine is ready."""
        self._closed_at, self._next_try = self._clock(), None

    @property
    def seconds_to_try(self) -> int | None:
        """Whole seconds until the next start, at least 1. None when no start is scheduled."""
        return None if self._next_try is None else max(1, math.ceil(self._next_try - self._clock()))


def _forget_before(times: deque[float], start: float) -> None:
    while times and times[0] < start:
        times.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Limits of the watchdog."""

    tick: float = 2.5
    """Seconds. There are no ticks while no request is open."""
    unready_ticks: int = 2
    """Silent ticks until the model is reported as not ready."""
    stuck_ticks: int = 4
    """Silent ticks without processor time until the engine is given up."""
    busy_ticks: int = 120
    """Silent ticks, busy or not, until the engine is given up."""
    stuck_load_ticks: int = 24
    """Ticks of a load without a message and without work (`load_work`) until the engine is given up."""
    busy_load_ticks: int = 720
    """Ticks of a load without a message, working or not, until the engine is given up."""


class Watchdog:
    """Timer that pings a silent engine and kills one that stays silent, or makes no progress in a load."""

    def __init__(self, watched: "Supervisor", limits: WatchLimits) -> None:
        self._watched = watched
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self.got_message = True
        """Set by the owner for each message; cleared every tick."""
        self._is_loading = False
        self._silent = self._unused = 0
        self._work: float | None = None

    def watch(self, *, is_loading: bool = False) -> None:
        if self._timer is None:
            self.got_message, self._is_loading = True, is_loading
            self._arm()

    def rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._silent = self._unused = 0

    def rest_between_requests(self) -> None:
        """Stop, unless it watches a load, which may have no requests."""
        if not self._is_loading:
            self.rest()

    @property
    def silence(self) -> float:
        """Seconds of silence that readiness should report; 0 while it answers, or loads and works."""
        ticks = self._unused if self._is_loading else self._silent
        if self.got_message or ticks < self._limits.unready_ticks:
            return 0.0
        return ticks * self._limits.tick

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limits.tick, self._tick)

    def _tick(self) -> None:
        self._arm()
        if self.got_message:
            self.got_message = False
            self._silent = self._unused = 0
            self._work = None
            return
        self._silent += 1
        if self._silent == 1 and not self._is_loading:
            self._watched.ping()
        self._unused = 0 if self._computes() else self._unused + 1
        if self._is_loading:
            self._judge_load()
        else:
            self._judge_step()

    def _judge_step(self) -> None:
        if self._unused >= self._limits.stuck_ticks:
            self._give_up("answer", self._silent, "it does not answer and uses no processor time")
        elif self._silent >= self._limits.busy_ticks:
            self._give_up("answer", self._silent, "it has been in one step for too long")

    def _judge_load(self) -> None:
        limits = self._limits
        if self._unused >= limits.stuck_load_ticks:
            self._give_up("progress", self._unused, "it loads, and neither computes nor reads")
        elif self._silent >= limits.busy_load_ticks:
            self._give_up("progress", self._silent, "its load has been in one stage for too long")
        elif self._unused == limits.unready_ticks:
            log.warning(
                "engine %s is loading without progress: %.0f s so far", self._watched.name, self.silence
            )

    def _computes(self) -> bool:
        before, least = self._work, 0.0
        if self._is_loading:
            self._work, least = load_work(self._watched.pid), _LEAST_LOAD_WORK * self._limits.tick
        else:
            self._work = self._watched.processor_seconds()
        if self._work is None:
            return True
        # The first reading has nothing to compare with: it counts as unused.
        return before is not None and self._work > before + least

    def _give_up(self, what: str, ticks: int, reason: str) -> None:
        seconds = ticks * self._limits.tick
        self.rest()
        self._watched.kill_stuck(f"no {what} for {seconds:.0f} s: {reason}")


_LEAST_LOAD_WORK: Final = 0.01
"""Share of a core below which a load does no work: threads of libraries poll."""
_DISK_BYTES_A_SECOND: Final = 10e6
"""Bytes from a disk that count as much as a second of a processor."""


def load_work(pid: int | None) -> float | None:
    """Return the work of a load so far: processor seconds of the process and its descendants, and what they
    have read from disks. None counts as work: it is unknown, or one of them waits for a disk, a core, or a
    lock on a file, which another process holds while it compiles kernels or rounds weights.
    """
    if pid is None:
        return None
    family, work = family_of(pid), 0.0
    for each in family:
        seconds = processor_seconds(each)
        if seconds is None and (each == pid or read_state(each) is not None):
            return None
        work += (seconds or 0.0) + bytes_from_disk(each) / _DISK_BYTES_A_SECOND
    return None if waits_for_file_lock(family) else work


def processor_seconds(pid: int) -> float | None:
    """Processor seconds used by a process. None if it is gone, or waits for a disk or for a core."""
    state = read_state(pid)
    if state is None or any(thread.waits_for_machine for thread in thread_states(pid)):
        return None
    return state.seconds


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP."""
    state = read_state(pid)
    return state is not None and state.is_stopped


def oom_kills() -> int:
    """Processes killed by this kernel's OOM killer since boot; 0 where the kernel does not report it."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
