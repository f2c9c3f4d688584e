"""Interfaces of the engine to the code that executes steps, synchronous or as micro-batches in flight, and to
a prefill engine.

Pipeline stages run in parallel only with steps that do not depend on each other, and a row depends on the
step that samples the token before it. So decoding requests are distributed in turn over as many steps
(micro-batches) as there are stages:

    stage 0   A   B   A'  B'  A"          A and B: steps of different requests
    stage 1       A   B   A'  B'          A': the next tokens of the requests of A
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ..ipc.handover_messages import Prefill, TakenSlots
from ..ipc.messages import AbortRequest, ToDaemon
from .request import Request
from .step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class PipelineDepth:
    """Number of steps in flight that a scheduler has to plan for."""

    stages: int = 1
    """Number of steps that are computed at the same time."""
    ahead: int = 1
    """Tokens of a request that may be unknown when its next one is scheduled: 0 if the host must know all of
    them, 1 if a sampled token stays on the device."""


ONE_STAGE = PipelineDepth()


def ceil_div(total: int, parts: int) -> int:
    """Return ceil(total / parts): the largest share of tokens or requests that are divided over `parts`
    steps.
    """
    return -(-total // parts)


class MicroBatcher:
    """Chooses the decoding requests of each step. It is the only writer of `Request.turn`."""

    def __init__(self) -> None:
        self._number = 1
        """Number of the step that is scheduled next."""

    def next_microbatch(self, decoding: list[Request], pipeline: PipelineDepth) -> list[Request]:
        """Return the requests of `decoding` for the next step: an equal share of those whose last token is
        known, or will be when the step runs.
        """
        if pipeline.stages == 1:
            return decoding
        latest = self._number - pipeline.stages
        ready = (
            request
            for request in decoding
            if request.num_pending == 0 or (request.turn <= latest and request.num_pending <= pipeline.ahead)
        )
        return self._share(ready, len(decoding), pipeline.stages)

    def fill_bubble(self, decoding: list[Request], pipeline: PipelineDepth) -> list[Request]:
        """Return requests for a step that would be empty: they wait for an earlier step, but not for the
        host.
        """
        ready = (request for request in decoding if request.num_pending <= pipeline.ahead)
        return self._share(ready, len(decoding), pipeline.stages)

    def record(self, plan: StepPlan) -> None:
        """Record that `plan` is scheduled."""
        for row in plan.rows:
            row.request.turn = self._number
        self._number += bool(plan.rows)

    def _share(self, ready: Iterable[Request], decoding: int, stages: int) -> list[Request]:
        """Return an equal share of `ready`, longest waiting first: `stages` consecutive steps take every
        request once.
        """
        size = max(1, (decoding + self._number % stages) // stages)
        return sorted(ready, key=lambda request: request.turn)[:size]


class ModelRunner(Protocol):
    """Owner of the model and the KV memory; it knows no queues."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy the plan's blocks, compute and write the KV of every row, sample where `row.samples`.

        Reads requests and never changes them. If it raises, the step counts as not done.
        """
        ...


class Executor(Protocol):
    """Asynchronous execution of steps: the device computes while the engine schedules.

    Steps run on the device in the order of their launches. KV and sampled tokens of earlier steps are read on
    the device: at launch `row.request.token_ids` may still lack them.
    """

    depth: int
    """Number of steps that may be launched before the results of an older one are collected."""
    stages: int
    """Number of pipeline stages, each with other layers: so many of the launched steps run at once."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the step and return a handle for `collect` without waiting."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step and return its result. Call it once per handle, in the order of launches.

        If `launch` or `collect` raises, no step that is not collected yet counts as done.
        """
        ...

    def prepare(self) -> bool:
        """Do one piece of idle-time work that makes later steps faster; False when nothing is left."""
        ...


class SyncExecutor:
    """Synchronous executor over a `ModelRunner`: a step is complete when `launch` returns."""

    depth = 0
    stages = 1

    def __init__(self, runner: ModelRunner, prepare: Callable[[], bool] = bool) -> None:
        """`prepare`: idle-time work of the runner, if it has some."""
        self.runner = runner
        self._prepare = prepare

    def launch(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def prepare(self) -> bool:
        return self._prepare()


def pipeline_of(runner: Executor) -> PipelineDepth:
    """Return the executor's stages and how many tokens of a request may be unknown at scheduling.

    Steps launched beyond one per stage are launched before the host knows the tokens they need.
    """
    return PipelineDepth(runner.stages, runner.depth + 1 - runner.stages)


class PrefillLink(Protocol):
    """Prefill engine as the decode engine sees it: it may die, and another one takes its place."""

    @property
    def pid(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_given_up(self) -> bool:
        """True once it died too often: prompts are computed in the decode engine."""
        ...

    @property
    def deaths(self) -> int:
        """Number of engines that ended. All that they sent was received before."""
        ...

    def send(self, message: Prefill | AbortRequest | TakenSlots) -> None:
        """Send a message, unless the engine is not ready."""
        ...

    def receive(self, *, is_waiting: bool) -> list[ToDaemon]:
        """Return the messages that have arrived. `is_waiting`: an answer is expected, so an engine that stays
        silent counts as hung.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait for a message."""
        ...

    def close(self) -> None: ...
