"""Profile of steps: methods of a running engine are timed while somebody asks for it.

The timers are put before the methods of these objects when profiling starts, and taken away when it ends: an
engine that is not profiled runs no line of this module.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from ..ipc.profile_messages import KernelShare, StepProfile

if TYPE_CHECKING:
    from llmbox.kernels.op_types import KernelProfiler

    from ..core.engine import Engine
    from ..core.step import ProfiledRunner, TimedHead
    from ..ipc.channel import Channel

REST: Final = "engine loop"
IDLE: Final = "waiting for requests"
MESSAGES: Final = "messages"
SCHEDULER: Final = "scheduler"
HEAD: Final = "output head"
ENGINE: Final = "engine"
BATCHES: Final = "batch building"
DEVICE: Final = "waiting for the device"
FORWARD: Final = "forward pass, Python"
SAMPLER: Final = "sampler"
LONGEST_S: Final = 600.0
"""Seconds after which profiling ends by itself: the caller may have died."""


class Timers:
    """Exclusive times: each moment counts for the innermost timed method that runs, or for `REST`."""

    def __init__(self, kernel_seconds: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.in_kernels: dict[str, float] = defaultdict(float)
        """The part of `seconds` in kernels."""
        self._kernel_seconds = kernel_seconds
        self._names = [REST]
        self._since, self._kernels_since = time.perf_counter(), kernel_seconds()
        self._timed: list[tuple[Any, str]] = []

    def put_before(self, function: Callable[..., Any], name: str | Callable[..., str]) -> None:
        """Time a method of one object. `name` may be computed from its arguments."""
        assert isinstance(function, MethodType)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._names.append(name if isinstance(name, str) else name(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._names.pop()

        owner, method = function.__self__, function.__name__
        setattr(owner, method, timed)
        self._timed.append((owner, method))

    def take_away(self) -> None:
        self._switch()
        for owner, method in self._timed:
            delattr(owner, method)
        self._timed.clear()

    def _switch(self) -> None:
        now, kernels = time.perf_counter(), self._kernel_seconds()
        name = self._names[-1]
        self.seconds[name] += now - self._since
        self.in_kernels[name] += kernels - self._kernels_since
        self._since, self._kernels_since = now, kernels


class StepProfiler:
    """Profile of the steps of one engine. `start`, `stop` and `end_if_late` are called between two steps."""

    def __init__(self, engine: "Engine", channel: "Channel") -> None:
        self._engine, self._channel = engine, channel
        self._model: TimedHead | None = None
        self._timers: Timers | None = None
        self._kernels: KernelProfiler | None = None
        self._profile = StepProfile(is_on=False)
        self._ends_at = 0.0
        self._steps_before = self._tokens_before = 0

    def start(self, seconds: float) -> StepProfile:
        """Begin anew, for `LONGEST_S` at most. Returns the rates that this machine reaches now."""
        self.stop()
        runner = self._engine.executor.profiled()
        self._model, self._kernels = runner.model, runner.ops.profiler
        reads = products = 0.0
        if self._kernels is not None:
            products = self._kernels.product_rate(runner.ops)
            head = None if runner.model is None else runner.model.head
            reads = 0.0 if head is None else self._kernels.read_rate(head)
            self._kernels.start(reads, products)
        self._profile = StepProfile(is_on=True, read_rate=reads, product_rate=products)
        self._steps_before, self._tokens_before = self._counts()
        self._ends_at = time.monotonic() + min(seconds, LONGEST_S)
        self._timers = self._put_timers(runner)
        if self._model is not None:
            self._model.times_head = True
        return self._profile

    def stop(self) -> StepProfile:
        """End, and return what was counted since the last start."""
        timers, self._timers = self._timers, None
        if timers is None:
            return self._profile
        timers.take_away()
        if self._model is not None:
            self._model.times_head = False
        kernels = self._kernels
        if kernels is not None:
            kernels.stop()
        steps, tokens = self._counts()
        head = timers.in_kernels.get(HEAD, 0.0)
        self._profile = StepProfile(
            is_on=False,
            steps=steps - self._steps_before,
            tokens=tokens - self._tokens_before,
            seconds=sum(timers.seconds.values()),
            spans={
                name: spent if name == HEAD else spent - timers.in_kernels[name]
                for name, spent in timers.seconds.items()
            },
            kernels=list(_kernel_shares(kernels, head)),
            threads=0 if kernels is None else kernels.threads,
            read_rate=self._profile.read_rate,
            product_rate=self._profile.product_rate,
        )
        return self._profile

    def _put_timers(self, runner: "ProfiledRunner") -> Timers:
        timers = Timers(self._kernels.seconds if self._kernels is not None else float)
        put, engine = timers.put_before, self._engine
        put(self._channel.receive, lambda *, block: IDLE if block else MESSAGES)
        put(self._channel.send, MESSAGES)
        put(engine.step, ENGINE)
        put(engine.scheduler.schedule, SCHEDULER)
        put(engine.scheduler.update, SCHEDULER)
        put(engine.executor.launch, BATCHES)
        put(engine.executor.collect, DEVICE)
        put(runner.forward, FORWARD)
        if runner.model is not None:
            put(runner.model.logits, HEAD)
        for method in runner.sampling:
            put(method, SAMPLER)
        return timers

    def end_if_late(self) -> None:
        if self._timers is not None and time.monotonic() > self._ends_at:
            self.stop()

    def _counts(self) -> tuple[int, int]:
        stats = self._engine.stats()
        return stats.steps, stats.prompt_tokens + stats.output_tokens


def _kernel_shares(kernels: "KernelProfiler | None", head: float) -> Iterator[KernelShare]:
    """Yield times by kind. The head's linear has a span of its own and is taken out of the others."""
    if kernels is None:
        return
    for kernel in kernels.read():
        seconds = kernel.seconds - head if kernel.name == "linears" else kernel.seconds
        if kernel.seconds:
            yield KernelShare(
                name=kernel.name,
                seconds=seconds,
                waited=kernel.waited,
                floor=kernel.floor,
                reading=kernel.reading,
            )
