"""Tables of where a step's time goes, from the local daemon, beside the bound of this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec

from llmbox.engine.ipc.profile_messages import StepProfile

from ..admin_client import Client
from ..errors import CliError
from ..telemetry.daemon_profile import DaemonTimes

BARRIERS: Final = "waiting for a slower thread"
IDLE: Final = "waiting for requests"
HEAD: Final = "output head"
_PATH: Final = "/admin/api/profile"
_ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LevelProfile:
    """Profile of one load. `seconds`: its duration as the client measured it."""

    engine: StepProfile
    daemon: DaemonTimes
    seconds: float

    @property
    def rows(self) -> dict[str, float]:
        """Seconds by what they went into, the largest first; they add up to the engine's time."""
        rows = {name: spent for name, spent in self.engine.spans.items() if spent > 0}
        for kernel in self.engine.kernels:
            rows[kernel.name] = max(0.0, kernel.seconds - kernel.waited)
        if waited := sum(kernel.waited for kernel in self.engine.kernels):
            rows[BARRIERS] = waited
        return dict(sorted(rows.items(), key=lambda row: -row[1]))

    @property
    def accounted(self) -> float:
        """Return the sum of the rows over the client's time."""
        return sum(self.rows.values()) / self.seconds

    @property
    def floor(self) -> float:
        """Return the seconds that reading weights and multiplying take at the machine's rates."""
        return sum(kernel.floor for kernel in self.engine.kernels)

    @property
    def bound(self) -> str:
        reading = sum(kernel.reading for kernel in self.engine.kernels)
        return "memory-bound" if reading > self.floor / 2 else "bound by multiplications"

    @property
    def thief(self) -> tuple[str, float]:
        """Return what takes most beside the bound, and its seconds; of linears what is above it."""
        excess = {name: spent for name, spent in self.rows.items() if name != IDLE}
        linears = sum(excess.pop(name, 0.0) for name in ("linears", HEAD, "experts"))
        excess["linears above that bound"] = max(0.0, linears - self.floor)
        return max(excess.items(), key=lambda row: row[1])

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        engine = asdict(self.engine)
        engine.pop("is_on")
        return {
            "rows": self.rows,
            "accounted": self.accounted,
            "bound": self.bound if self.floor else None,
            "bound_share": self.floor / self.busy if self.floor and self.busy else None,
            "thief": self.thief[0] if self.floor else None,
            "engine": engine,
            "daemon": msgspec.to_builtins(self.daemon),
        }

    @property
    def busy(self) -> float:
        """Return the engine's seconds without its waiting for requests."""
        return self.engine.seconds - self.engine.spans.get(IDLE, 0.0)

    def lines(self) -> tuple[list[tuple[str, str, str]], list[str]]:
        """Return the rows of a table (name, ms a step, share), and sentences to stand below it."""
        steps = max(1, self.engine.steps)
        table = [
            (name, f"{spent / steps * 1e3:.2f}", f"{spent / self.seconds:.1%}")
            for name, spent in self.rows.items()
            if spent / self.seconds >= _SHOWN
        ]
        small = sum(spent for spent in self.rows.values() if spent / self.seconds < _SHOWN)
        table.append(("smaller ones", f"{small / steps * 1e3:.2f}", f"{small / self.seconds:.1%}"))
        table.append(("together", f"{sum(self.rows.values()) / steps * 1e3:.2f}", f"{self.accounted:.1%}"))
        return table, [self._verdict(), self._beside()]

    def _verdict(self) -> str:
        if not self.floor or not self.busy:
            return "No bound is known for these kernels."
        name, seconds = self.thief
        engine = self.engine
        return (
            f"{self.bound}, {self.floor / self.busy:.0%} of what this machine sustains (reads "
            f"{engine.read_rate / 1e9:.0f} GB/s, multiplies {engine.product_rate / 1e9:.0f} G/s, "
            f"{engine.threads} threads); the thief is {name}, {seconds / max(1, engine.steps) * 1e3:.2f} ms "
            "a step"
        )

    def _beside(self) -> str:
        steps = max(1, self.engine.steps)

        def name(times: dict[str, float]) -> str:
            shown = sorted(times.items(), key=lambda time: -time[1])
            return ", ".join(f"{name} {spent / steps * 1e3:.2f}" for name, spent in shown if spent > 0)

        return (
            f"Beside the engine, the daemon's processor time in ms a step: {name(self.daemon.threads)} "
            f"(event loop: {name(self.daemon.loop)})"
        )


_SHOWN: Final = 0.002
"""Smallest share of the time that gets a row."""


class ProfileSession:
    """Holds the profile when the session has ended."""

    def __init__(self) -> None:
        self.engine: StepProfile | None = None
        self.daemon: DaemonTimes | None = None

    def of_level(self, seconds: float) -> LevelProfile:
        """Raises CliError where the engine took no step, as after a restart."""
        if self.engine is None or self.daemon is None or not self.engine.steps:
            raise CliError(
                "there is no profile of this load",
                "the engine took no step between start and end: it may have been restarted",
                "llmbox logs",
            )
        return LevelProfile(self.engine, self.daemon, seconds)


@asynccontextmanager
async def profiled(admin: Client, model: str) -> AsyncIterator[ProfileSession]:
    """Profile the steps of a model meanwhile. Raises CliError."""
    session = ProfileSession()
    await asyncio.to_thread(admin.post, _PATH, {"model": model, "is_on": True}, _ANSWER_S)
    try:
        yield session
    except BaseException:
        with suppress(CliError):
            admin.post(_PATH, {"model": model, "is_on": False}, _ANSWER_S)
        raise
    answer = await asyncio.to_thread(admin.post, _PATH, {"model": model, "is_on": False}, _ANSWER_S)
    session.engine = msgspec.convert(answer["engine"], StepProfile)
    session.daemon = msgspec.convert(answer["daemon"], DaemonTimes)
