"""Sampling on the C++ kernels: `Ops.best_of`, `draw` and `rank`.

R rows of logits, S rows with logprobs, N alternatives.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..sampling_types import CandidateRanks, DrawRow, LogitEdits
from .command_buffer import CPUOperations
from .ffi import NativeDrawRow as NativeRow

NO_EDITS = (0,) * 12 + (-1,)
"""Edits of a row without any. The last number: every id is allowed."""


class CPUSampling(CPUOperations):
    """Sampler. Logits are float32 rows that do not overlap."""

    def best_of(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits_RV.shape
        assert logits_RV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        best_R = self.recorder.result("best", rows, 1, torch.float32).view(-1)
        id_R = self.recorder.result("best", rows, 1, torch.int64).view(-1)
        numbers = logits_RV, logits_RV.stride(0), width, best_R, id_R
        self.recorder.launch(self.library.llmbox_best_op, rows, *numbers)
        return best_R, id_R

    def draw(self, logits_RV: Tensor, rows: Sequence[DrawRow]) -> Tensor:
        count, width = _shape(logits_RV)
        assert count == len(rows)
        kept: list[Any] = []
        how = (NativeRow * count)(*(_native(row, kept) for row in rows))
        drawn_R3 = torch.empty(count, 3, dtype=torch.float64)
        numbers = logits_RV, logits_RV.stride(0), width, how, drawn_R3
        self.recorder.launch(self.library.llmbox_draw_op, count, *numbers, keeps=kept)
        return drawn_R3

    def rank(self, logits_RV: Tensor, rows: Sequence[int], chosen: Sequence[int], top: int) -> CandidateRanks:
        width, count = _shape(logits_RV)[1], len(rows)
        top = min(top, width)
        rows_S, chosen_S = array("q", rows), array("q", chosen)
        stats_S4 = torch.zeros(count, 4, dtype=torch.float64)
        ids_SN, logits_SN = torch.zeros(count, top, dtype=torch.int64), torch.zeros(count, top)
        chosen = rows_S.buffer_info()[0], chosen_S.buffer_info()[0], top
        numbers = logits_RV, logits_RV.stride(0), width, *chosen, stats_S4, ids_SN, logits_SN
        self.recorder.launch(self.library.llmbox_rank_op, count, *numbers, keeps=(rows_S, chosen_S))
        return CandidateRanks(stats_S4, ids_SN, logits_SN)


def _shape(logits_RV: Tensor) -> tuple[int, int]:
    rows, width = logits_RV.shape
    assert logits_RV.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    assert rows == 1 or logits_RV.stride(0) >= width
    return rows, width


def _native(row: DrawRow, kept: list[Any]) -> NativeRow:
    """Convert to the C struct; `kept` collects the objects that its pointers refer to."""
    edits = NO_EDITS if row.edits is None else _native_edits(row.edits, kept)
    return NativeRow(row.temperature, row.top_p, row.min_p, row.top_k, row.seed, row.position, *edits)


def _native_edits(edits: LogitEdits, kept: list[Any]) -> tuple[float, ...]:
    forbidden = array("q", edits.forbidden)
    kept += (edits, forbidden)
    allowed = edits.allowed
    return (
        edits.bias_ids.data_ptr(),
        edits.biases.data_ptr(),
        len(edits.bias_ids),
        edits.counted_ids.data_ptr(),
        edits.counts.data_ptr(),
        len(edits.counted_ids),
        edits.repetition,
        edits.frequency,
        edits.presence,
        forbidden.buffer_info()[0],
        len(forbidden),
        0 if allowed is None else allowed.data_ptr(),
        -1 if allowed is None else len(allowed),
    )
