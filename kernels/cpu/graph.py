"""A forward pass on a tape: recorded at its first call, run in one call afterwards."""

from collections.abc import Callable

from torch import Tensor

from ..ops import StepInputs
from ..ragged import Ragged
from .native import Step
from .recorder import Recorder, Tape

SMALLEST_TAPE = 64
"""Rows. A larger step records a larger tape."""


class Graph:
    """`body` recorded at its first call, and again when a step has more rows than the tape has room for."""

    def __init__(self, recorder: Recorder, body: Callable[[StepInputs], tuple[Tensor, ...]]) -> None:
        self._recorder = recorder
        self._body = body
        self._tape: Tape | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, inputs: StepInputs) -> tuple[Tensor, ...]:
        rows = len(inputs.ids_T)
        if self._tape is None or rows > self._tape.capacity:
            self._tape, self._outputs = None, ()  # let go before the larger one is made
            capacity = max(SMALLEST_TAPE, 1 << (rows - 1).bit_length())
            with self._recorder.recording(capacity, inputs.cos_ATD) as tape:
                self._outputs = self._body(inputs)
            self._tape = tape
        step = ragged_step(rows, next(iter(inputs.plans.values())).ragged)
        step.ids = inputs.ids_T.data_ptr()
        step.cos, step.sin = inputs.cos_ATD.data_ptr(), inputs.sin_ATD.data_ptr()
        self._tape.run(step)
        return tuple(output[:rows] for output in self._outputs)


def ragged_step(rows: int, ragged: Ragged) -> Step:
    """`ragged` must stay alive until the step has run."""
    return Step(
        rows=rows,
        sequences=len(ragged.query_lens),
        block_size=ragged.block_size,
        table_width=ragged.block_tables_NB.shape[1],
        query_starts=ragged.query_starts_N1.data_ptr(),
        contexts=ragged.context_lens_N.data_ptr(),
        block_tables=ragged.block_tables_NB.data_ptr(),
        slots=ragged.slots_T.data_ptr(),
    )
