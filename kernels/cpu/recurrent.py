"""Operations of recurrent layers on the C++ kernels."""

import torch
from torch import Tensor

from ..op_types import BatchLayout
from ..recurrent import RecurrentOps, RecurrentState, ScanRule, ScanShape, ScanWeights
from ..support import MAX_CONV_WIDTH
from .command_buffer import CPUOperations, ragged_step
from .weight_packing import DTYPES

RULES: dict[ScanRule, int] = {"delta": 0, "ssm": 1, "kda": 2, "s6": 3}


class CPURecurrent(CPUOperations):
    """Recurrent operations of one kernel library."""

    def ops(self) -> RecurrentOps:
        return RecurrentOps(
            self.short_conv,
            self.scan,
            self.gated_norm,
            self.sigmoid_mul,
            self.silu_mul,
            self.softplus_mul,
            self.mul_add,
            self.swap_heads,
        )

    def short_conv(
        self,
        x: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        gated: bool,
        state: RecurrentState,
        layer: int,
        layout: BatchLayout,
    ) -> Tensor:
        width, channels = weight_KC.shape
        assert x.stride(1) == 1
        assert width <= MAX_CONV_WIDTH
        assert weight_KC.is_contiguous()
        out_TC = self.recorder.result("short_conv", len(x), channels, x.dtype)
        weights = weight_KC, bias_C, width, channels
        self.recorder.launch(
            self.library.llmbox_short_conv_op,
            ragged_step(len(x), layout),
            *(DTYPES[x.dtype], x, x.stride(0), gated, *weights, state.conv_LSKC[layer], out_TC),
        )
        return out_TC

    def scan(
        self,
        rows: Tensor,
        gates: Tensor,
        weights: ScanWeights,
        shape: ScanShape,
        state: RecurrentState,
        layer: int,
        layout: BatchLayout,
    ) -> Tensor:
        assert rows.stride(1) == gates.stride(1) == 1
        assert rows.dtype == gates.dtype
        out = self.recorder.result("scan", len(rows), shape.heads * shape.value_dim, rows.dtype)
        self.recorder.launch(
            self.library.llmbox_scan_op,
            ragged_step(len(rows), layout),
            *(DTYPES[rows.dtype], RULES[shape.rule], rows, rows.stride(0), gates, gates.stride(0)),
            *(weights.rate_H, weights.bias_H, weights.skip_H),
            *(shape.heads, shape.key_heads, shape.key_dim, shape.value_dim, *shape.limits, shape.beta),
            *(state.memory_LSHAB[layer], out),
        )
        return out

    def gated_norm(
        self, x_TnD: Tensor, gate_TnD: Tensor, weight_nD: Tensor, eps: float, norm_first: bool
    ) -> Tensor:
        rows, groups, width = x_TnD.shape
        assert x_TnD.stride()[1:] == gate_TnD.stride()[1:] == (width, 1)
        assert weight_nD.dtype == torch.float32
        out = self.recorder.result("gated_norm", rows, groups * width, x_TnD.dtype)
        self.recorder.launch(
            self.library.llmbox_gated_norm_op,
            rows,
            *(DTYPES[x_TnD.dtype], x_TnD, x_TnD.stride(0), gate_TnD, gate_TnD.stride(0)),
            *(weight_nD, groups, width, eps, norm_first, out),
        )
        return out

    def sigmoid_mul(self, x_TF: Tensor, gate_TF: Tensor) -> Tensor:
        """Multiply in place."""
        return self._gate(0, x_TF, gate_TF)

    def silu_mul(self, x_TF: Tensor, gate_TF: Tensor) -> Tensor:
        """Multiply in place."""
        return self._gate(1, x_TF, gate_TF)

    def softplus_mul(self, x_TF: Tensor, gate_TF: Tensor) -> Tensor:
        """Multiply in place."""
        return self._gate(2, x_TF, gate_TF)

    def mul_add(self, x_TN: Tensor, by_N: Tensor, added_TN: Tensor | None) -> Tensor:
        assert x_TN.stride(1) == 1
        assert by_N.dtype == torch.float32
        assert added_TN is None or added_TN.is_contiguous()
        (rows, width), dtype = x_TN.shape, DTYPES[x_TN.dtype]
        out_TN = self.recorder.result("mul_add", rows, width, x_TN.dtype)
        numbers = dtype, x_TN, x_TN.stride(0), by_N, added_TN, width, out_TN
        self.recorder.launch(self.library.llmbox_mul_add_op, rows, *numbers)
        return out_TN

    def swap_heads(self, x_TMND: Tensor) -> Tensor:
        assert x_TMND.is_contiguous()
        rows, outer, inner, width = x_TMND.shape
        out = self.recorder.result("swap_heads", rows, outer * inner * width, x_TMND.dtype)
        out_TNMD = out.view(-1, inner, outer, width)
        for each in range(inner):
            self.recorder.copy(out_TNMD[:, each], x_TMND[:, :, each])
        return out

    def _gate(self, function: int, x_TF: Tensor, gate_TF: Tensor) -> Tensor:
        assert x_TF.stride(1) == gate_TF.stride(1) == 1
        (rows, width), dtype = x_TF.shape, DTYPES[x_TF.dtype]
        numbers = dtype, function, x_TF, x_TF.stride(0), gate_TF, gate_TF.stride(0), width
        self.recorder.launch(self.library.llmbox_gate_rows_op, rows, *numbers)
        return x_TF
