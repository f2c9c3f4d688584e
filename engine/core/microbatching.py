"""Which decoding requests go into a step, where several steps are on their way at once.

The stages of a pipeline are busy side by side only with steps that do not wait for each other, and a row
waits for the step that draws the token before it. So decoding requests are dealt out, in turn, to as many
steps as there are stages:

    stage 0   A   B   A'  B'  A"          A and B: steps of different requests
    stage 1       A   B   A'  B'          A': the next tokens of those of A
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .request import Request
from .step import StepPlan


@dataclass(frozen=True, slots=True)
class PipelineDepth:
    stages: int = 1
    """Steps that are computed at the same time."""
    ahead: int = 1
    """Tokens of a request that may be unknown when its next is scheduled: 0 where the host must know all of
    them, 1 where a drawn token stays on the device."""


ONE_STAGE = PipelineDepth()


def share(total: int, stages: int) -> int:
    """The most that one of `stages` steps at a time gets, of tokens or of decoding requests."""
    return -(-total // stages)


class MicroBatcher:
    """The only writer of `Request.turn`."""

    def __init__(self) -> None:
        self._number = 1
        """Of the step that is scheduled next."""

    def due(self, decoding: list[Request], pipeline: PipelineDepth) -> list[Request]:
        """Those of `decoding` that the next step takes: a fair share of those whose last token is known, or
        will be by the time the step runs.
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

    def early(self, decoding: list[Request], pipeline: PipelineDepth) -> list[Request]:
        """For a step that would be empty: those that have to wait for a step before, but not for the host."""
        ready = (request for request in decoding if request.num_pending <= pipeline.ahead)
        return self._share(ready, len(decoding), pipeline.stages)

    def end(self, plan: StepPlan) -> None:
        """The next step is scheduled."""
        for row in plan.rows:
            row.request.turn = self._number
        self._number += bool(plan)

    def _share(self, ready: Iterable[Request], decoding: int, stages: int) -> list[Request]:
        """Of each `stages` steps in a row, all together take every request once."""
        size = max(1, (decoding + self._number % stages) // stages)
        return sorted(ready, key=lambda request: request.turn)[:size]
