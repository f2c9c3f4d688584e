"""Sampling on the C++ kernels: `Ops.best_of`, `draw` and `rank`.

R rows of logits, S rows with logprobs, N alternatives.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..sampling_types import CandidateRanks, DrawRow, LogitEdits
from .command_buffer import CommandRecorder
from .ffi import NativeDrawRow as NativeRow
from .ffi import Step

NO_EDITS = (0,) * 12 + (-1,)
"""Edits of a row without any. The last number: every id is allowed."""


class CPUSampling:
    """Sampler. Logits are float32 rows that do not overlap."""

    def __init__(self, library: ctypes.CDLL, recorder: CommandRecorder) -> None:
        self._library = library
        self._recorder = recorder

    def best_of(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits_RV.shape
        assert logits_RV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        best_R = self._recorder.result("best", rows, 1, torch.float32).view(-1)
        id_R = self._recorder.result("best", rows, 1, torch.int64).view(-1)
        op = self._library.llmbox_best_op(
            logits_RV.data_ptr(), logits_RV.stride(0), width, best_R.data_ptr(), id_R.data_ptr()
        )
        self._recorder.submit(op, Step(rows=rows), logits_RV, best_R, id_R)
        return best_R, id_R

    def draw(self, logits_RV: Tensor, rows: Sequence[DrawRow]) -> Tensor:
        count, width = _shape(logits_RV)
        assert count == len(rows)
        kept: list[Any] = []
        how = (NativeRow * count)(*(_native(row, kept) for row in rows))
        drawn_R3 = torch.empty(count, 3, dtype=torch.float64)
        op = self._library.llmbox_draw_op(
            logits_RV.data_ptr(), logits_RV.stride(0), width, ctypes.addressof(how), drawn_R3.data_ptr()
        )
        self._recorder.submit(op, Step(rows=count), logits_RV, how, kept)
        return drawn_R3

    def rank(self, logits_RV: Tensor, rows: Sequence[int], chosen: Sequence[int], top: int) -> CandidateRanks:
        width, count = _shape(logits_RV)[1], len(rows)
        top = min(top, width)
        rows_S, chosen_S = array("q", rows), array("q", chosen)
        stats_S4 = torch.zeros(count, 4, dtype=torch.float64)
        ids_SN, logits_SN = torch.zeros(count, top, dtype=torch.int64), torch.zeros(count, top)
        op = self._library.llmbox_rank_op(
            logits_RV.data_ptr(),
            logits_RV.stride(0),
            width,
            rows_S.buffer_info()[0],
            chosen_S.buffer_info()[0],
            top,
            stats_S4.data_ptr(),
            ids_SN.data_ptr(),
            logits_SN.data_ptr(),
        )
        self._recorder.submit(op, Step(rows=count), logits_RV, rows_S, chosen_S)
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
