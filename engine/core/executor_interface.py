"""How the engine and a runner take turns: one step at a time, or the next ones launched meanwhile."""

from typing import Any, Protocol

from .microbatching import PipelineDepth
from .step import StepPlan, StepResult


class ModelRunner(Protocol):
    """Owns the model and the KV memory; knows nothing of queues."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the plan's copies, then write KV for every row and sample where `row.samples`.

        Reads requests, never changes them. May raise: the step then counts as not done.
        """
        ...


class Executor(Protocol):
    """What the engine drives: a runner whose device works while Python goes on.

    Steps run on the device in the order of their launches. What a step must read of the one before (KV,
    sampled tokens) it finds on the device: when it is launched, `row.request.token_ids` may still lack them.
    """

    depth: int
    """Steps that may be launched before the results of an older one are taken."""
    stages: int
    """Of these and that one, how many are computed at the same time, each in another part of the layers."""

    def launch(self, plan: StepPlan) -> Any:
        """Begin the step and return at once, with a handle for `collect`."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step. Once for each handle, in the order of launches.

        Whatever either raises, none of the steps that were not collected counts as done.
        """
        ...

    def prepare(self) -> bool:
        """Something that makes later steps faster, for a moment without work; False: nothing is left."""
        ...


class SyncExecutor:
    """Makes one of a `ModelRunner`, which works while it is called: a step is done when it is launched."""

    depth = 0
    stages = 1

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def launch(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def prepare(self) -> bool:
        return False


def pipeline_of(runner: Executor) -> PipelineDepth:
    """What is launched beyond a step for each stage is launched before the tokens that it needs are known."""
    return PipelineDepth(runner.stages, runner.depth + 1 - runner.stages)
