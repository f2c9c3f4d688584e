"""Switch between one engine and a pair of engines (`--disaggregate auto`), by what their steps took.

A model begins with one engine. Where its prompts hold up running requests it is started again as a pair, and
as one engine once they no longer would. Open requests then go on with the tokens they would have had.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.machine import read_cpu
from llmbox.engine.ipc.messages import EngineStats, ModelInfo
from llmbox.engine.ipc.sequence_times import StepWork
from llmbox.engine.planning.disaggregation import find_obstacle

from ..errors import ApiError
from ..util.formatting import span
from .step_times import FEW_STEPS, RARE, Interference, recommend_pair

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = logging.getLogger("llmbox.engines")

WAIT_S: Final = 300.0
"""Maximum seconds to wait for a moment without requests."""
WINDOW_S: Final = 300.0
"""Minimum seconds before a pair is evaluated: a pause between prompts is not their end."""
HOLD_S: Final = 600.0
"""Seconds from a return to one engine until the next pair; each return doubles them."""
_EVERY: Final = 32
"""Number of steps between two evaluations of the measurements."""


def usable_cores(config: EngineConfig) -> int:
    """Return the cores that the engines of a model share."""
    return config.threads or _cores()


@cache
def _cores() -> int:
    return read_cpu().cores


@dataclass(frozen=True, slots=True)
class EnginePairDecision:
    """Engines that a model should run on, and the reason in words."""

    pair: tuple[int, int] | None
    reason: str


class EnginePairPolicy:
    """Comparison of one engine and a pair of engines, by their counters. Times are seconds of `clock`."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._not_before = 0.0
        self._returns = 0
        self._one: tuple[float, float] | None = None
        """Mean seconds of a step with prompts in one engine, and running requests of a step."""
        self._since = 0.0
        self._mark = EngineStats()

    def begin(self) -> None:
        """Note that an engine is ready, whose counters begin at zero."""
        self._since, self._mark = self._clock(), EngineStats()

    def hold(self) -> float:
        """Suspend pairs for a while; each call doubles the time. Returns the seconds."""
        seconds = HOLD_S * 2.0 ** min(self._returns, 10)
        self._returns += 1
        self._not_before = self._clock() + seconds
        return seconds

    @property
    def seconds_held(self) -> float:
        return max(0.0, self._not_before - self._clock())

    def judge(self, measured: Interference, stats: EngineStats, info: ModelInfo) -> EnginePairDecision | None:
        """Return engines that would serve better than the running ones; None if the running ones are best."""
        if info.disaggregate is None:
            return self._judge_one(measured, stats.work, info)
        return self._judge_pair(stats, info)

    def _judge_one(
        self, measured: Interference, work: StepWork, info: ModelInfo
    ) -> EnginePairDecision | None:
        if self.seconds_held:
            return None
        wanted = recommend_pair(measured, work, info, usable_cores(self._config))
        if wanted is None:
            return None
        assert measured.ratio is not None
        self._one = measured.mixed_seconds / measured.mixed_steps, measured.rows / measured.steps
        return EnginePairDecision(
            wanted,
            f"steps with a prompt in them took {measured.ratio:.1f} times as long "
            f"({measured.share:.1%} of the steps)",
        )

    def _judge_pair(self, stats: EngineStats, info: ModelInfo) -> EnginePairDecision | None:
        before, now = self._mark.work, stats.work
        steps = now.steps - before.steps
        if steps < FEW_STEPS or self._clock() - self._since < WINDOW_S:
            return None
        rows = (now.decode_rows - before.decode_rows) / steps
        seconds = (now.seconds - before.seconds) / steps
        handed = stats.handed_tokens - self._mark.handed_tokens
        self._since, self._mark = self._clock(), stats
        # Steps that one engine would have had for these prompts.
        mixed = handed / max(1.0, info.step_tokens(1) - rows)
        share = mixed / (mixed + steps)
        if share < RARE / 2:
            return EnginePairDecision(None, f"prompts would be in {share:.1%} of the steps of one engine")
        if self._one is not None and seconds > self._one[0] * max(1.0, rows / max(1.0, self._one[1])):
            took = f"{span(seconds)} a token, {span(self._one[0])} beside prompts in one engine"
            return EnginePairDecision(None, f"streams were slower than beside prompts: {took}")
        return None


class PairSwitch:
    """Switch of one supervised model. Use it only from the event loop."""

    def __init__(self, switched: "Supervisor", clock: Callable[[], float]) -> None:
        self._of, self._clock = switched, clock
        self._judge = EnginePairPolicy(switched.config, clock)
        self._wanted: EnginePairDecision | None = None
        self._wanted_at = 0.0
        self._count = 0
        self._task: asyncio.Task[None] | None = None
        self._fallback: EngineConfig | None = None
        """Configuration of before, until the engines of a switch are ready."""
        self._next: EngineConfig | None = None
        """Configuration to start once the engine has ended."""
        self._why = ""
        """Reason why these engines run, or why they were not replaced."""

    @property
    def is_on(self) -> bool:
        return self._of.config.auto_disaggregate

    def describe(self) -> str:
        """Describe which engines run and why; empty without `--disaggregate auto`."""
        info = self._of.info
        if not self.is_on or info is None:
            return ""
        now = "one engine" if info.disaggregate is None else "a pair {}:{}".format(*info.disaggregate)
        if self._wanted is not None:
            soon = f"at the next moment without requests {_name(self._wanted.pair)}"
            return f"{now}; {soon}: {self._wanted.reason}"
        if obstacle := self._obstacle(info):
            return f"{now}: a pair {obstacle}"
        why = self._why or "prompts hold up running requests too little, or too little was measured"
        held = self._judge.seconds_held
        later = f"; no pair for {span(held)}" if held and info.disaggregate is None else ""
        return f"{now}: {why}{later}"

    def _obstacle(self, info: ModelInfo) -> str:
        if info.disaggregate is not None:
            return ""
        device = info.device.partition(":")[0]
        obstacle = find_obstacle(self._of.config, device, is_encoder=not info.generates)
        return obstacle or ("needs two cores" if usable_cores(self._of.config) < 2 else "")

    # ------------------------------------------------------------------ called by the supervisor

    def begin(self) -> None:
        """Note that an engine is ready."""
        self._fallback = self._wanted = None
        self._judge.begin()
        self._of.queue.learns_all |= self.is_on

    def note_step(self) -> None:
        """Evaluate the measurements, every few steps."""
        self._count += 1
        if self._count % _EVERY or self._task is not None:
            return
        of = self._of
        if of.info is None or self._obstacle(of.info):
            return
        if self._wanted is None:
            self._wanted = self._judge.judge(of.queue.times.interference, of.stats, of.info)
            self._wanted_at = self._clock()
            if self._wanted is not None:
                log.info(
                    "%s is to run as %s: %s", of.config.name, _name(self._wanted.pair), self._wanted.reason
                )
        if self._wanted is not None and self._clock() - self._wanted_at > WAIT_S:
            self._start()

    def note_idle(self) -> None:
        """Start a pending switch: no request is open."""
        if self._wanted is not None and self._task is None:
            self._start()

    def take_exit(self, cause: str) -> EngineConfig | None:
        """Return the config to start after an engine that ended because of a switch, or whose first start
        after a switch failed. None for any other end.
        """
        if self._next is not None:
            planned, self._next = self._next, None
            return planned
        fallback, self._fallback = self._fallback, None
        if fallback is not None:
            self._refuse(cause)
        return fallback

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------------ internals

    def _start(self) -> None:
        wanted, self._wanted = self._wanted, None
        assert wanted is not None
        self._task = asyncio.create_task(self._switch(wanted), name=f"switch {self._of.config.name}")
        self._task.add_done_callback(self._switched)

    def _switched(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the engines of %s could not be switched", self._of.config.name, exc_info=error)

    async def _switch(self, wanted: EnginePairDecision) -> None:
        of, info = self._of, self._of.info
        assert info is not None
        # Requests that fit go on fitting: with less context it is not loaded.
        config = replace(of.config, disaggregate=wanted.pair, context=info.context_window)
        try:
            admitted = await of.readmit(config)
        except ApiError as error:
            self._refuse(error.message)
            return
        if of.state != "ready":
            return  # it died meanwhile: its restart is under way
        if wanted.pair is None:
            self._judge.hold()
        of.queue.times.forget_interference()
        self._why = wanted.reason
        self._fallback, self._next = of.admitted, admitted
        cause = f"it is started again as {_name(wanted.pair)} (--disaggregate auto): {wanted.reason}"
        log.info("%s: %s", of.config.name, cause)
        await of.end_engine(cause)

    def _refuse(self, cause: str) -> None:
        seconds = self._judge.hold()
        self._why = f"other engines could not be started: {cause}"
        log.warning(
            "%s keeps its engines for %s: others could not be started: %s",
            self._of.config.name,
            span(seconds),
            cause,
        )


def _name(pair: tuple[int, int] | None) -> str:
    return "one engine" if pair is None else "a pair {}:{}".format(*pair)
