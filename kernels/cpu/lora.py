"""Operations of LoRA adapters on the C++ kernels."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..lora import ExpertLora, LoraOps, LoraRows, LoraSite, LoraWeights, panels_of, unload
from .command_buffer import CommandRecorder
from .ffi import Step
from .weight_packing import DTYPES

PANEL = 64
"""Outputs of a panel of B: `LORA_PANEL` of native/linear/lora.h."""


class CPULora:
    """Adapters on one kernel library."""

    def __init__(self, library: ctypes.CDLL, recorder: CommandRecorder) -> None:
        self._library = library
        self._recorder = recorder

    def ops(self) -> LoraOps:
        return LoraOps(self.load, self.load_table, unload, self.add, self.embed, self.load_experts)

    def load(self, site: LoraSite, slot: int, weights: LoraWeights) -> None:
        """Pack the weights, and write their address: `LoraWeights` of native/linear/lora.h as integers."""
        assert weights.a_RI.is_contiguous()
        assert weights.scales_R.dtype == torch.float32
        panels = [panels_of(piece, PANEL) for piece in weights.pieces]
        numbers = [weights.a_RI.data_ptr(), weights.scales_R.data_ptr(), len(weights.a_RI), len(panels)]
        for piece, panel in zip(weights.pieces, panels, strict=True):
            numbers += [piece.start, piece.stop, piece.first, piece.b_Or.shape[1], panel.data_ptr()]
        header = torch.tensor(numbers, dtype=torch.int64)
        # B itself is not read again: its panels stay in its place.
        pieces = tuple(
            replace(piece, b_Or=panel) for piece, panel in zip(weights.pieces, panels, strict=True)
        )
        site.weights[slot] = replace(weights, pieces=pieces, packed=header)
        site.addresses[slot] = header.data_ptr()

    def load_table(self, site: LoraSite, slot: int, table_VE: Tensor) -> None:
        assert table_VE.is_contiguous()
        site.tables[slot] = table_VE
        site.addresses[slot] = table_VE.data_ptr()

    def load_experts(self, site: LoraSite, slot: int, count: int, batches: Sequence[ExpertLora]) -> None:
        """Write a table: the address of each expert's weights, 0 where it has none, and the most ranks."""
        table = torch.zeros(count + 1, dtype=torch.int64)
        kept: list[object] = [table]
        for batch in batches:
            weights, each = batch.weights, torch.arange(len(batch.experts))
            assert weights.a_RI.is_contiguous()
            ranks = weights.a_RI.shape[1]
            panels = [panels_of(piece, PANEL) for piece in weights.pieces]
            columns: list[Tensor | int] = [
                _addresses(weights.a_RI),
                weights.scales_R.data_ptr(),
                ranks,
                len(panels),
            ]
            for piece, panel in zip(weights.pieces, panels, strict=True):
                columns += [piece.start, piece.stop, piece.first, piece.b_Or.shape[2], _addresses(panel)]
            headers = torch.stack([torch.zeros_like(each) + column for column in columns], 1).contiguous()
            table[list(batch.experts)] = _addresses(headers)
            table[count] = max(int(table[count]), ranks)
            kept += [headers, weights.a_RI, weights.scales_R, panels]
        site.experts[slot] = kept
        site.addresses[slot] = table.data_ptr()

    def add(self, site: LoraSite, x_TI: Tensor, y_TO: Tensor, rows: LoraRows) -> None:
        assert x_TI.stride(1) == y_TO.stride(1) == 1
        op = self._library.llmbox_lora_op(
            DTYPES[x_TI.dtype],
            DTYPES[y_TO.dtype],
            site.addresses.buffer_info()[0],
            x_TI.data_ptr(),
            x_TI.stride(0),
            x_TI.shape[1],
            y_TO.data_ptr(),
            y_TO.stride(0),
        )
        step = Step(rows=len(x_TI))
        step.use_adapters(rows)
        self._recorder.submit(op, step, site, x_TI, y_TO)

    def embed(self, site: LoraSite, ids_T: Tensor, x_TE: Tensor, scale: float, rows: LoraRows) -> None:
        op = self._library.llmbox_lora_embedding_op(
            DTYPES[x_TE.dtype],
            site.addresses.buffer_info()[0],
            scale,
            x_TE.data_ptr(),
            x_TE.stride(0),
            x_TE.shape[1],
        )
        ids = ids_T.contiguous()
        step = Step(rows=len(ids), ids=ids.data_ptr())
        step.use_adapters(rows)
        self._recorder.submit(op, step, site, x_TE)


def _addresses(stack: Tensor) -> Tensor:
    """Return the address of each element of the first dimension of a contiguous tensor."""
    return stack.data_ptr() + torch.arange(len(stack)) * (stack.stride(0) * stack.element_size())
