"""Rank 0's runners: tell every rank the step and compute rank 0's own part of it.

`ParallelRunner` is for runners that work while they are called: a launch is the work of the first stage.
`DeviceRanks` launches steps ahead, over ranks that all run `gpu/runner.py`.
"""

from typing import Any, Protocol

from ..step import StepPlan, StepResult
from .layout import Layout
from .link import Frame
from .step_codec import StepEncoder, decode_result
from .watch import Watch


class LocalRunner(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


class Handle(Protocol):
    def wait(self) -> None:
        """Until the step is done on this rank's device."""
        ...


class LocalDevice(Protocol):
    """What every rank runs of steps that overlap: `DeviceRunner`."""

    depth: int

    @property
    def urgent_capture(self) -> int | None: ...
    @property
    def next_capture(self) -> int | None: ...
    def size_for(self, plan: StepPlan) -> int: ...
    def launch_sized(self, plan: StepPlan, size: int) -> Any:
        """-> a `Handle`."""
        ...

    def collect(self, handle: Any) -> StepResult: ...
    def capture(self, size: int) -> None: ...


class Others(Protocol):
    """The other ranks, from rank 0: `Crew`."""

    layout: Layout

    def send(self, frame: Frame) -> None:
        """To all."""
        ...

    def receive(self, rank: int) -> Frame: ...
    def dismiss(self) -> None: ...
    def close(self) -> None: ...


class ParallelRunner:
    """An `OverlappingRunner`. All ranks run the same steps and draw the same tokens; those of one rank count.

    While later stages go on with a step, the first computes its part of the next: with one stage a step is
    done when it is launched, with more there is one for each.
    """

    def __init__(self, local: LocalRunner, crew: Others, watch: Watch) -> None:
        self.stages = crew.layout.pp
        self.depth = self.stages - 1
        self._local = local
        self._crew = crew
        self._watch = watch
        self._encoder = StepEncoder()

    def launch(self, plan: StepPlan) -> StepResult | None:
        with self._watch.guarding():
            self._crew.send(self._encoder.encode(plan))
            result = self._local.execute(plan)
            return result if self._crew.layout.answers == 0 else None

    def collect(self, handle: StepResult | None) -> StepResult:
        if handle is not None:
            return handle
        with self._watch.guarding():
            return decode_result(self._crew.receive(self._crew.layout.answers))

    def prepare(self) -> bool:
        return False

    def dismiss(self) -> None:
        """The others begin to end, and may: nobody watches them any more."""
        self._watch.close()
        self._crew.dismiss()

    def close(self) -> None:
        self.dismiss()
        self._crew.close()


class DeviceRanks:
    """An `OverlappingRunner`. Every rank launches the same steps, of the same size, in the same order, and
    captures the same graphs between them, as rank 0 decides; so what their devices exchange meets.

    What others than the answering rank drew is not asked for: it is the same.
    """

    def __init__(self, local: LocalDevice, crew: Others, watch: Watch) -> None:
        self.depth, self.stages = local.depth, crew.layout.pp
        self._local = local
        self._crew = crew
        self._watch = watch
        self._encoder = StepEncoder()

    def launch(self, plan: StepPlan) -> Any:
        with self._watch.guarding():
            if (urgent := self._local.urgent_capture) is not None:
                self._capture(urgent)
            size = self._local.size_for(plan)
            self._crew.send(self._encoder.encode(plan, size))
            return self._local.launch_sized(plan, size)

    def collect(self, handle: Any) -> StepResult:
        answers = self._crew.layout.answers
        with self._watch.guarding():
            if answers == 0:
                result: StepResult = self._local.collect(handle)
                return result
            handle.wait()
            return decode_result(self._crew.receive(answers))

    def prepare(self) -> bool:
        size = self._local.next_capture
        if size is not None:
            with self._watch.guarding():
                self._capture(size)
        return size is not None

    def dismiss(self) -> None:
        """The others begin to end, and may: nobody watches them any more."""
        self._watch.close()
        self._crew.dismiss()

    def close(self) -> None:
        self.dismiss()
        self._crew.close()

    def _capture(self, size: int) -> None:
        self._crew.send(Frame("capture", {"size": size}))
        self._local.capture(size)
