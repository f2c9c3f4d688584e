"""Interface between the engine and the code that executes steps: synchronous, or with steps in flight."""

from collections.abc import Callable
from typing import Any, Protocol

from .microbatching import PipelineDepth
from .step import StepPlan, StepResult


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
