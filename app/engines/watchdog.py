"""Notices an engine that has stopped answering while it has work.

Time is counted in ticks in which nothing arrived, not between two clock readings: when the daemon itself
stood still (stopped, starved, suspended) it comes back to one late tick, and does not blame the engine. A
silent engine that uses its processor is computing (one long step, a starved machine) and is given long;
one that uses none is stopped or stuck.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmbox.engine.hardware.proc import read_state, thread_states


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    tick: float = 2.5
    """Seconds. Nothing ticks while no request is open."""
    unready_ticks: int = 2
    """Silent ticks until readiness says so."""
    stuck_ticks: int = 4
    """Silent ticks without processor time until the engine is given up."""
    busy_ticks: int = 120
    """Silent ticks whatever it computes until it is given up."""


class Watched(Protocol):
    """The engine process, as the watchdog sees it."""

    def ping(self) -> None: ...
    def processor_seconds(self) -> float | None:
        """Used so far; None when it cannot be told, or it waits for a disk or a core: taken as busy."""
        ...

    def stuck(self, reason: str) -> None: ...


class Watchdog:
    def __init__(self, watched: Watched, limits: WatchLimits) -> None:
        self._watched = watched
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._heard = True
        self._silent = self._unused = 0
        self._seconds: float | None = None

    def watch(self) -> None:
        if self._timer is None:
            self._heard = True
            self._arm()

    def rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._silent = self._unused = 0

    def heard(self) -> None:
        self._heard = True

    @property
    def silence(self) -> float:
        """Seconds without a word that readiness should report; 0 while all is well."""
        if self._heard or self._silent < self._limits.unready_ticks:
            return 0.0
        return self._silent * self._limits.tick

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limits.tick, self._tick)

    def _tick(self) -> None:
        self._arm()
        if self._heard:
            self._heard = False
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
        self._watched.stuck(f"no answer for {seconds:.0f} s: {reason}")


def processor_seconds(pid: int) -> float | None:
    """None for one that is gone, or of which a thread waits for a disk, or for a core that others have."""
    state = read_state(pid)
    if state is None or any(thread.waits_for_machine for thread in thread_states(pid)):
        return None
    return state.seconds


def is_stopped(pid: int) -> bool:
    """Whether somebody sent it SIGSTOP."""
    state = read_state(pid)
    return state is not None and state.is_stopped


def oom_kills() -> int:
    """Processes that this kernel has killed for want of memory since boot; 0 if it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
