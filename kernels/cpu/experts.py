"""Mixture-of-experts layers on the C++ kernels."""

import ctypes

import torch
from torch import Tensor

from ..activation import CODES
from ..lora import ExpertAdapters, LoraRows
from ..op_types import ExpertResults, Mixture
from .command_buffer import CommandRecorder
from .ffi import NativeHeldExperts, NativeRouting, Step
from .weight_packing import DTYPES, pointer, pointers


def strided(rows: Tensor | None) -> tuple[int | None, int]:
    """Return address and stride of rows that may be missing."""
    return (None, 0) if rows is None else (rows.data_ptr(), rows.stride(0))


class CPUExperts:
    """Expert operations of one kernel library (`Ops.experts`, `expert_results`, `combine_experts`)."""

    def __init__(self, library: ctypes.CDLL, recorder: CommandRecorder) -> None:
        self.library = library
        self.recorder = recorder

    def experts(
        self,
        mixture: Mixture,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None = None,
        gate_T1: Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Run the experts; logits of router and gate are float32, as `logits` returns them."""
        out_TE = self.recorder.result("experts", len(x_TE), x_TE.shape[1], x_TE.dtype)
        self._experts_to(out_TE, mixture, x_TE, logits_TX, (shared_TE, gate_T1), adapters)
        return out_TE

    def expert_results(
        self, mixture: Mixture, x_TE: Tensor, logits_TX: Tensor, adapters: ExpertAdapters | None = None
    ) -> ExpertResults:
        rows, (hidden, per_token) = len(x_TE), (x_TE.shape[1], mixture.per_token)
        results = ExpertResults(
            self.recorder.result("expert results", rows, per_token * hidden, x_TE.dtype),
            self.recorder.result("expert shares", rows, per_token, torch.float32),
            self.recorder.result("expert owners", rows, per_token, torch.int32),
        )
        self._experts_to(results.rows_TKE, mixture, x_TE, logits_TX, (None, None), adapters, results)
        return results

    def _experts_to(
        self,
        out: Tensor,
        mixture: Mixture,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared: tuple[Tensor | None, Tensor | None],
        adapters: ExpertAdapters | None,
        results: ExpertResults | None = None,
    ) -> None:
        shared_TE, _ = shared
        assert logits_TX.dtype == torch.float32
        assert shared_TE is None or (shared_TE.dtype == x_TE.dtype and shared_TE.stride(1) == 1)
        assert logits_TX.stride(1) == x_TE.stride(1) == 1
        assert results is None or mixture.owners is not None
        assert CODES[mixture.activation] < 4
        here = NativeHeldExperts.of(mixture, None if results is None else mixture.owners)
        op = self.library.llmbox_experts_op(
            DTYPES[x_TE.dtype],
            mixture.gate_ups[0].quant is not None,
            mixture.count,
            here,
            len(mixture.here),
            pointer(mixture.load_X),
            pointers(mixture.gate_ups),
            pointers(mixture.downs),
            *strided(x_TE),
            *strided(logits_TX),
            mixture.per_token,
            mixture.normalized,
            NativeRouting.of(mixture.routing),
            CODES[mixture.activation],
            *(each for tensor in shared for each in strided(tensor)),
            *strided(out),
            None if adapters is None else adapters.gate_ups.addresses.buffer_info()[0],
            None if adapters is None else adapters.downs.addresses.buffer_info()[0],
            None if results is None else results.shares_TK.data_ptr(),
            None if results is None else results.owners_TK.data_ptr(),
        )
        step = Step(rows=len(x_TE))
        if adapters is not None:
            assert isinstance(adapters.rows, LoraRows)
            step.use_adapters(adapters.rows)
        self.recorder.submit(op, step, mixture, here.kept, x_TE, logits_TX, shared, out, adapters, results)

    def combine_experts(
        self, results: ExpertResults | None, shared_TE: Tensor | None = None, gate_T1: Tensor | None = None
    ) -> Tensor:
        rows, shares = (None, None) if results is None else (results.rows_TKE, results.shares_TK)
        like = shared_TE if rows is None else rows
        assert like is not None
        per_token = 0 if shares is None else shares.shape[1]
        out_TE = self.recorder.result("experts", len(like), like.shape[1] // max(1, per_token), like.dtype)
        op = self.library.llmbox_combine_op(
            DTYPES[like.dtype],
            pointer(rows),
            pointer(shares),
            per_token,
            out_TE.shape[1],
            *strided(shared_TE),
            *strided(gate_T1),
            *strided(out_TE),
        )
        self.recorder.submit(op, Step(rows=len(like)), results, shared_TE, gate_T1, out_TE)
        return out_TE
