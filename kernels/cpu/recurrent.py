"""Operations of recurrent layers on the C++ kernels."""

import ctypes

import torch
from torch import Tensor

from ..op_types import BatchLayout
from ..recurrent import RecurrentOps, RecurrentState, ScanRule, ScanShape, ScanWeights
from ..support import MAX_CONV_WIDTH
from .command_buffer import CommandRecorder, ragged_step
from .ffi import Step
from .weight_packing import DTYPES

RULES: dict[ScanRule, int] = {"delta": 0, "ssm": 1, "kda": 2, "s6": 3}


class CPURecurrent:
    """Recurrent operations of one kernel library."""

    def __init__(self, library: ctypes.CDLL, recorder: CommandRecorder) -> None:
        self._library = library
        self._recorder = recorder

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
        out_TC = self._recorder.result("short_conv", len(x), channels, x.dtype)
        op = self._library.llmbox_short_conv_op(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            gated,
            weight_KC.data_ptr(),
            _pointer(bias_C),
            width,
            channels,
            state.conv_LSKC[layer].data_ptr(),
            out_TC.data_ptr(),
        )
        self._recorder.submit(op, ragged_step(len(x), layout), x, weight_KC, bias_C, state, out_TC)
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
        out = self._recorder.result("scan", len(rows), shape.heads * shape.value_dim, rows.dtype)
        op = self._library.llmbox_scan_op(
            DTYPES[rows.dtype],
            RULES[shape.rule],
            rows.data_ptr(),
            rows.stride(0),
            gates.data_ptr(),
            gates.stride(0),
            weights.rate_H.data_ptr(),
            weights.bias_H.data_ptr(),
            _pointer(weights.skip_H),
            shape.heads,
            shape.key_heads,
            shape.key_dim,
            shape.value_dim,
            *shape.limits,
            shape.beta,
            state.memory_LSHAB[layer].data_ptr(),
            out.data_ptr(),
        )
        self._recorder.submit(op, ragged_step(len(rows), layout), rows, gates, weights, state, out)
        return out

    def gated_norm(
        self, x_TnD: Tensor, gate_TnD: Tensor, weight_nD: Tensor, eps: float, norm_first: bool
    ) -> Tensor:
        rows, groups, width = x_TnD.shape
        assert x_TnD.stride()[1:] == gate_TnD.stride()[1:] == (width, 1)
        assert weight_nD.dtype == torch.float32
        out = self._recorder.result("gated_norm", rows, groups * width, x_TnD.dtype)
        op = self._library.llmbox_gated_norm_op(
            DTYPES[x_TnD.dtype],
            x_TnD.data_ptr(),
            x_TnD.stride(0),
            gate_TnD.data_ptr(),
            gate_TnD.stride(0),
            weight_nD.data_ptr(),
            groups,
            width,
            eps,
            norm_first,
            out.data_ptr(),
        )
        self._recorder.submit(op, Step(rows=rows), x_TnD, gate_TnD, weight_nD, out)
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
        out_TN = self._recorder.result("mul_add", len(x_TN), x_TN.shape[1], x_TN.dtype)
        op = self._library.llmbox_mul_add_op(
            DTYPES[x_TN.dtype],
            x_TN.data_ptr(),
            x_TN.stride(0),
            by_N.data_ptr(),
            _pointer(added_TN),
            x_TN.shape[1],
            out_TN.data_ptr(),
        )
        self._recorder.submit(op, Step(rows=len(x_TN)), x_TN, by_N, added_TN, out_TN)
        return out_TN

    def swap_heads(self, x_TMND: Tensor) -> Tensor:
        assert x_TMND.is_contiguous()
        rows, outer, inner, width = x_TMND.shape
        out = self._recorder.result("swap_heads", rows, outer * inner * width, x_TMND.dtype)
        out_TNMD = out.view(-1, inner, outer, width)
        for each in range(inner):
            part_TMD, place_TMD = x_TMND[:, :, each], out_TNMD[:, each]
            read = part_TMD.data_ptr(), *part_TMD.stride()[:2], outer, width
            written = place_TMD.data_ptr(), *place_TMD.stride()[:2]
            op = self._library.llmbox_copy_op(DTYPES[x_TMND.dtype], *read, *written)
            self._recorder.submit(op, Step(rows=rows), x_TMND, out)
        return out

    def _gate(self, function: int, x_TF: Tensor, gate_TF: Tensor) -> Tensor:
        assert x_TF.stride(1) == gate_TF.stride(1) == 1
        op = self._library.llmbox_gate_rows_op(
            DTYPES[x_TF.dtype],
            function,
            x_TF.data_ptr(),
            x_TF.stride(0),
            gate_TF.data_ptr(),
            gate_TF.stride(0),
            x_TF.shape[1],
        )
        self._recorder.submit(op, Step(rows=len(x_TF)), x_TF, gate_TF)
        return x_TF


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
