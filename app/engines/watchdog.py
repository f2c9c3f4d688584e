"""Watchdog: detect an engine that has stopped answering while it has work.

Time is counted in ticks in which nothing arrived, not between two clock readings. When the daemon itself was
stopped, starved or suspended, it sees one late tick and does not blame the engine.

A silent engine that uses its processor is computing (one long step, a starved machine) and gets a long limit.
One that uses none is stopped or stuck.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmbox.engine.hardware.proc import read_state, thread_states


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


class Watched(Protocol):
    """Engine process as the watchdog sees it."""

    def ping(self) -> None: ...
    def processor_seconds(self) -> float | None:
        """Processor seconds used so far. None when unknown, or while a thread waits for a disk or a core:
        counts as busy.
        """
        ...

    def kill_stuck(self, reason: str) -> None: ...


class Watchdog:
    """Timer that pings a silent engine and kills one that stays silent."""

    def __init__(self, watched: Watched, limits: WatchLimits) -> None:
        self._watched = watched
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._got_message = True
        self._silent = self._unused = 0
        self._seconds: float | None = None

    def watch(self) -> None:
        if self._timer is None:
            self._got_message = True
            self._arm()

    def rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._silent = self._unused = 0

    def note_message(self) -> None:
        self._got_message = True

    @property
    def silence(self) -> float:
        """Seconds of silence that readiness should report; 0 while it answers."""
        if self._got_message or self._silent < self._limits.unready_ticks:
            return 0.0
        return self._silent * self._limits.tick

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limits.tick, self._tick)

    def _tick(self) -> None:
        self._arm()
        if self._got_message:
            self._got_message = False
            self._silent = self._unused = 0
            self._seconds = None
            return
        self._silent += 1
        if self._silent == 1:
            self._watched.ping()
        self._unused = 0 if self._computes() else self._unused + 1
        if self._unused >= self._limits.stuck_ticks:
            self._give_up("it does not answer and uses no processor time")
        elif self._silent >= self._limits.busy_ticks:
            self._give_up("it has been in one step for too long")

    def _computes(self) -> bool:
        before, self._seconds = self._seconds, self._watched.processor_seconds()
        if self._seconds is None:
            return True
        # The first reading has nothing to compare with: it counts as unused.
        return before is not None and self._seconds > before

    def _give_up(self, reason: str) -> None:
        seconds = self._silent * self._limits.tick
        self.rest()
        self._watched.kill_stuck(f"no answer for {seconds:.0f} s: {reason}")


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
