"""Operations of Gemma 3n on the C++ kernels."""

import ctypes

import torch
from torch import Tensor

from ..op_types import AltUpOps
from .command_buffer import CommandRecorder
from .ffi import Step
from .weight_packing import DTYPES


class CPUAltUp:
    """Operations on streams of one kernel library."""

    def __init__(self, library: ctypes.CDLL, recorder: CommandRecorder) -> None:
        self._library = library
        self._recorder = recorder

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
        streams = coefs_JN.shape[1]
        _require_floats(routed_TN, coefs_JN)
        out = self._recorder.result("predict", len(x), x.shape[1], x.dtype)
        op = self._library.llmbox_predict_streams_op(
            DTYPES[x.dtype],
            x.data_ptr(),
            routed_TN.data_ptr(),
            coefs_JN.data_ptr(),
            streams,
            x.shape[1] // streams,
            out.data_ptr(),
        )
        self._recorder.submit(op, Step(rows=len(x)), x, routed_TN, coefs_JN, out)
        return out

    def correct(
        self, predicted: Tensor, x_TE: Tensor, stream: int, routed_TN: Tensor, coefs_NN: Tensor
    ) -> Tensor:
        _require_floats(routed_TN, coefs_NN)
        assert x_TE.is_contiguous()
        out = self._recorder.result("correct", len(x_TE), predicted.shape[1], x_TE.dtype)
        op = self._library.llmbox_correct_streams_op(
            DTYPES[x_TE.dtype],
            predicted.data_ptr(),
            x_TE.data_ptr(),
            routed_TN.data_ptr(),
            coefs_NN.data_ptr(),
            len(coefs_NN),
            stream,
            x_TE.shape[1],
            out.data_ptr(),
        )
        self._recorder.submit(op, Step(rows=len(x_TE)), predicted, x_TE, routed_TN, coefs_NN, out)
        return out

    def add_to_others(self, x: Tensor, added_TE: Tensor) -> None:
        assert x.is_contiguous()
        assert added_TE.is_contiguous()
        width = added_TE.shape[1]
        op = self._library.llmbox_add_to_streams_op(
            DTYPES[x.dtype], x.data_ptr(), added_TE.data_ptr(), x.shape[1] // width, width
        )
        self._recorder.submit(op, Step(rows=len(x)), x, added_TE)

    def match_size(self, x: Tensor, like_TE: Tensor, eps: float) -> None:
        assert x.is_contiguous()
        assert like_TE.stride(1) == 1
        width = like_TE.shape[1]
        op = self._library.llmbox_match_size_op(
            DTYPES[x.dtype],
            x.data_ptr(),
            like_TE.data_ptr(),
            like_TE.stride(0),
            x.shape[1] // width,
            width,
            eps,
        )
        self._recorder.submit(op, Step(rows=len(x)), x, like_TE)

    def gate_sums(self, gate_TF: Tensor) -> Tensor:
        assert gate_TF.stride(1) == 1
        out_T2 = self._recorder.result("gate_sums", len(gate_TF), 2, torch.float32)
        op = self._library.llmbox_gate_sums_op(
            DTYPES[gate_TF.dtype],
            gate_TF.data_ptr(),
            gate_TF.stride(0),
            gate_TF.shape[1],
            out_T2.data_ptr(),
        )
        self._recorder.submit(op, Step(rows=len(gate_TF)), gate_TF, out_T2)
        return out_T2

    def cut_gates(self, gate_TF: Tensor, sums_T2: Tensor, width: int, factor: float) -> None:
        assert gate_TF.stride(1) == 1
        _require_floats(sums_T2)
        op = self._library.llmbox_cut_gates_op(
            DTYPES[gate_TF.dtype],
            gate_TF.data_ptr(),
            gate_TF.stride(0),
            gate_TF.shape[1],
            sums_T2.data_ptr(),
            width,
            factor,
        )
        self._recorder.submit(op, Step(rows=len(gate_TF)), gate_TF, sums_T2)


def _require_floats(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
