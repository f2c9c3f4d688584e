"""Rank 0's runner: tells every rank the step and computes its own part of it."""

from typing import Protocol

from ..step import StepPlan, StepResult
from .crew import Crew
from .step_codec import StepEncoder, decode_result
from .watch import Watch


class LocalRunner(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


class ParallelRunner:
    """A `Runner`. All ranks run the same step and draw the same tokens; those of one rank count."""

    def __init__(self, local: LocalRunner, crew: Crew, watch: Watch) -> None:
        self._local = local
        self._crew = crew
        self._watch = watch
        self._encoder = StepEncoder()

    def execute(self, plan: StepPlan) -> StepResult:
        with self._watch.step():
            try:
                return self._execute(plan)
            except Exception:
                # Maybe a rank is gone: then the watch ends the engine, as it was no fault of the step.
                self._watch.wait_for_end()
                raise

    def _execute(self, plan: StepPlan) -> StepResult:
        self._crew.send(self._encoder.encode(plan))
        result = self._local.execute(plan)
        answers = self._crew.layout.answers
        return result if answers == 0 else decode_result(self._crew.receive(answers))

    def close(self) -> None:
        self._watch.close()
        self._crew.close()
