"""Norms, RoPE, activations and other operations on single rows, on the C++ kernels; streams of Gemma 3n."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..activation import UNGATED, XIELU, Activation, LimitedSwiGLU, code_of
from ..op_types import AltUpOps
from .command_buffer import CPUOperations
from .ffi import Step
from .weight_packing import DTYPES


class CPUElementwise(CPUOperations):
    """Operations of `Ops` on single rows."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        groups, width = weight.shape if weight.dim() == 2 else (1, len(weight))
        assert x.stride(-1) == 1
        assert x.dim() == 2 or x.stride(1) == width
        out = self.recorder.result("rms_norm", len(x), groups * width, x.dtype)
        dtypes = DTYPES[x.dtype], DTYPES[weight.dtype]
        numbers = x, x.stride(0), weight, groups, width, eps, out
        self.recorder.launch(self.library.llmbox_norm_op, len(x), *dtypes, *numbers)
        return out.view(len(out), *x.shape[1:])

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        assert residual_TE.is_contiguous()
        assert x_TE.stride(1) == 1
        out_TE = self.recorder.result("add_rms_norm", len(x_TE), len(weight_E), x_TE.dtype)
        dtypes = DTYPES[x_TE.dtype], DTYPES[weight_E.dtype]
        numbers = x_TE, x_TE.stride(0), residual_TE, weight_E, len(weight_E), eps, out_TE
        self.recorder.launch(self.library.llmbox_add_norm_op, len(x_TE), *dtypes, *numbers)
        return out_TE

    def layer_norm(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        weight_E: Tensor,
        eps: float,
        bias_E: Tensor | None = None,
    ) -> Tensor:
        assert bias_E is None or bias_E.dtype == weight_E.dtype
        assert residual_TE is None or residual_TE.is_contiguous()
        assert x_TE.stride(1) == 1
        out_TE = self.recorder.result("layer_norm", len(x_TE), len(weight_E), x_TE.dtype)
        dtypes = DTYPES[x_TE.dtype], DTYPES[weight_E.dtype]
        numbers = x_TE, x_TE.stride(0), residual_TE, weight_E, bias_E, len(weight_E), eps, out_TE
        self.recorder.launch(self.library.llmbox_layer_norm_op, len(x_TE), *dtypes, *numbers)
        return out_TE

    def rotary(self, x_TnD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        rows, heads, width = x_TnD.shape
        assert x_TnD.stride()[1:] == (width, 1)
        numbers = DTYPES[x_TnD.dtype], x_TnD, x_TnD.stride(0), heads, width, self.recorder.table_of(cos_TD)
        cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
        step = Step(rows=rows)
        step.use_angles(cos_TD, sin_TD)
        self.recorder.launch(self.library.llmbox_rotary_op, step, *numbers)
        return x_TnD

    def gate_mul(self, gate_up_T2F: Tensor, activation: Activation | LimitedSwiGLU | XIELU) -> Tensor:
        """Multiply in place, over the gates: rows of the result are strided."""
        if isinstance(activation, XIELU):
            return self._xielu(gate_up_T2F, activation)
        width = gate_up_T2F.shape[1] // (1 if activation in UNGATED else 2)
        codes = DTYPES[gate_up_T2F.dtype], *code_of(activation)
        numbers = gate_up_T2F, gate_up_T2F.stride(0), width
        self.recorder.launch(self.library.llmbox_gate_mul_op, len(gate_up_T2F), *codes, *numbers)
        return gate_up_T2F[:, :width]

    def _xielu(self, x_TF: Tensor, numbers: XIELU) -> Tensor:
        assert x_TF.stride(1) == 1
        (rows, width), dtype = x_TF.shape, DTYPES[x_TF.dtype]
        self.recorder.launch(self.library.llmbox_xielu_op, rows, dtype, x_TF, x_TF.stride(0), width, *numbers)
        return x_TF

    def scale(self, x_TE: Tensor, factor: float) -> Tensor:
        assert x_TE.stride(1) == 1
        numbers = DTYPES[x_TE.dtype], x_TE, x_TE.stride(0), x_TE.shape[1], factor
        self.recorder.launch(self.library.llmbox_scale_op, len(x_TE), *numbers)
        return x_TE

    def softcap(self, logits_RV: Tensor, cap: float) -> Tensor:
        """Cap logits in place; they are float32, as `logits` returns them."""
        assert logits_RV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        rows, width = logits_RV.shape
        self.recorder.launch(self.library.llmbox_softcap_op, rows, logits_RV, logits_RV.stride(0), width, cap)
        return logits_RV

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        rows, heads, _ = parts[0].shape
        width = sum(part.shape[2] for part in parts)
        out_THD = self.recorder.result("concat", rows, heads * width, parts[0].dtype).view(-1, heads, width)
        start = 0
        for part in parts:
            self.recorder.copy(out_THD[:, :, start:], part)
            start += part.shape[2]
        return out_THD


class CPUAltUp(CPUOperations):
    """Operations of Gemma 3n on streams."""

    def ops(self) -> AltUpOps:
        return AltUpOps(
            self.predict,
            self.correct,
            self.add_to_others,
            self.match_size,
            self.gate_sums,
            self.cut_gates,
        )

    def predict(self, x: Tensor, routed_TN: Tensor, coefs_JN: Tensor) -> Tensor:
        (rows, whole), streams = x.shape, coefs_JN.shape[1]
        _require_floats(routed_TN, coefs_JN)
        out = self.recorder.result("predict", rows, whole, x.dtype)
        numbers = DTYPES[x.dtype], x, routed_TN, coefs_JN, streams, whole // streams, out
        self.recorder.launch(self.library.llmbox_predict_streams_op, rows, *numbers)
        return out

    def correct(
        self, predicted: Tensor, x_TE: Tensor, stream: int, routed_TN: Tensor, coefs_NN: Tensor
    ) -> Tensor:
        _require_floats(routed_TN, coefs_NN)
        assert x_TE.is_contiguous()
        rows, width = x_TE.shape
        out = self.recorder.result("correct", rows, predicted.shape[1], x_TE.dtype)
        numbers = predicted, x_TE, routed_TN, coefs_NN, len(coefs_NN), stream, width, out
        self.recorder.launch(self.library.llmbox_correct_streams_op, rows, DTYPES[x_TE.dtype], *numbers)
        return out

    def add_to_others(self, x: Tensor, added_TE: Tensor) -> None:
        assert x.is_contiguous()
        assert added_TE.is_contiguous()
        width = added_TE.shape[1]
        numbers = DTYPES[x.dtype], x, added_TE, x.shape[1] // width, width
        self.recorder.launch(self.library.llmbox_add_to_streams_op, len(x), *numbers)

    def match_size(self, x: Tensor, like_TE: Tensor, eps: float) -> None:
        assert x.is_contiguous()
        assert like_TE.stride(1) == 1
        width = like_TE.shape[1]
        numbers = DTYPES[x.dtype], x, like_TE, like_TE.stride(0), x.shape[1] // width, width, eps
        self.recorder.launch(self.library.llmbox_match_size_op, len(x), *numbers)

    def gate_sums(self, gate_TF: Tensor) -> Tensor:
        assert gate_TF.stride(1) == 1
        rows, width = gate_TF.shape
        out_T2 = self.recorder.result("gate_sums", rows, 2, torch.float32)
        numbers = DTYPES[gate_TF.dtype], gate_TF, gate_TF.stride(0), width, out_T2
        self.recorder.launch(self.library.llmbox_gate_sums_op, rows, *numbers)
        return out_T2

    def cut_gates(self, gate_TF: Tensor, sums_T2: Tensor, width: int, factor: float) -> None:
        assert gate_TF.stride(1) == 1
        _require_floats(sums_T2)
        numbers = DTYPES[gate_TF.dtype], gate_TF, gate_TF.stride(0), gate_TF.shape[1], sums_T2, width, factor
        self.recorder.launch(self.library.llmbox_cut_gates_op, len(gate_TF), *numbers)


def _require_floats(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
