"""Mixture-of-experts layers on the C++ kernels."""

import torch
from torch import Tensor

from ..activation import CODES
from ..lora import ExpertAdapters, LoraRows
from ..op_types import ExpertResults, Mixture
from .command_buffer import CPUOperations
from .ffi import NativeHeldExperts, NativeRouting, Step
from .weight_packing import DTYPES, pointers


def strided(rows: Tensor | None) -> tuple[Tensor | None, int]:
    """Return rows that may be missing, and their stride."""
    return rows, 0 if rows is None else rows.stride(0)


class CPUExperts(CPUOperations):
    """Expert operations of one kernel library (`Ops.experts`, `expert_results`, `combine_experts`)."""

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
        shared_TE, gate_T1 = shared
        assert logits_TX.dtype == torch.float32
        assert shared_TE is None or (shared_TE.dtype == x_TE.dtype and shared_TE.stride(1) == 1)
        assert logits_TX.stride(1) == x_TE.stride(1) == 1
        assert results is None or mixture.owners is not None
        assert CODES[mixture.activation] < 4
        here = NativeHeldExperts.of(mixture, None if results is None else mixture.owners)
        step = Step(rows=len(x_TE))
        if adapters is not None:
            assert isinstance(adapters.rows, LoraRows)
            step.use_adapters(adapters.rows)
        self.recorder.launch(
            self.library.llmbox_experts_op,
            step,
            DTYPES[x_TE.dtype],
            mixture.gate_ups[0].quant is not None,
            mixture.count,
            here,
            len(mixture.here),
            mixture.load_X,
            pointers(mixture.gate_ups),
            pointers(mixture.downs),
            *strided(x_TE),
            *strided(logits_TX),
            mixture.per_token,
            mixture.normalized,
            NativeRouting.of(mixture.routing),
            CODES[mixture.activation],
            *strided(shared_TE),
            *strided(gate_T1),
            *strided(out),
            None if adapters is None else adapters.gate_ups.addresses.buffer_info()[0],
            None if adapters is None else adapters.downs.addresses.buffer_info()[0],
            None if results is None else results.shares_TK,
            None if results is None else results.owners_TK,
            keeps=(mixture, here.kept, adapters),
        )

    def combine_experts(
        self, results: ExpertResults | None, shared_TE: Tensor | None = None, gate_T1: Tensor | None = None
    ) -> Tensor:
        rows, shares = (None, None) if results is None else (results.rows_TKE, results.shares_TK)
        like = shared_TE if rows is None else rows
        assert like is not None
        per_token = 0 if shares is None else shares.shape[1]
        out_TE = self.recorder.result("experts", len(like), like.shape[1] // max(1, per_token), like.dtype)
        results_and_width = DTYPES[like.dtype], rows, shares, per_token, out_TE.shape[1]
        parts = *strided(shared_TE), *strided(gate_T1), *strided(out_TE)
        self.recorder.launch(self.library.llmbox_combine_op, len(like), *results_and_width, *parts)
        return out_TE
