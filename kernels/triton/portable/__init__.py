"""Triton kernels with the bits of the C++ kernels over integer weights and int8 keys and values."""

from dataclasses import replace

import torch
from torch import Tensor

from ...activation import XIELU, Activation, LimitedSwiGLU
from ...ops import Ops
from ..backend import TritonBackend
from ..linear.linear import DenseLinear, Linear, WeightOnlyIntLinear
from . import attention, linear, rows
from .arithmetic import cos_sin


def make_portable(backend: TritonBackend, device: torch.device) -> Ops:
    """Return the operations of a dense decoder for `--exact portable`. Others are absent, or those of
    `backend`, which `require_runnable` refuses to run.
    """
    dtype = backend.dtype

    def multiply(packed: Linear, x_TI: Tensor, to: torch.dtype = dtype, ranks: int = 0) -> Tensor:
        assert isinstance(packed, WeightOnlyIntLinear)
        return linear.linear(packed, x_TI, to, ranks)

    def multiply_shares(packed: Linear, x_TI: Tensor, ranks: int) -> Tensor:
        return multiply(packed, x_TI, dtype if ranks == 1 else torch.float32, ranks)

    def embed(table: Linear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
        assert isinstance(table, WeightOnlyIntLinear | DenseLinear)
        return linear.embed(table, ids_T, dtype, scale)

    def gate(gate_up_T2F: Tensor, activation: Activation | LimitedSwiGLU | XIELU) -> Tensor:
        assert not isinstance(activation, XIELU)
        return rows.gate_mul(gate_up_T2F, activation)

    whole = backend.ops(device)
    return replace(
        whole,
        embedding=embed,
        linear=multiply,
        logits=lambda packed, x_TI: multiply(packed, x_TI, torch.float32),
        linear_in_shares=multiply_shares,
        rms_norm=lambda x, weight, eps: rows.norm(x, None, weight, eps),
        add_rms_norm=rows.norm_sum,
        fused_norm=lambda norm: norm(None)[0],
        writing_rows_for=None,
        gate_mul=gate,
        softcap=rows.softcap,
        scale=linear.scale,
        rotary=attention.rotary,
        write_kv=attention.write_kv,
        rotate_and_write=attention.rotate_and_write,
        attention=attention.attention,
        cos_sin=cos_sin,
        kv_dtypes=frozenset({torch.int8}),
        recurrent=None,
        lora=None,
        attend_texts=None,
        row_invariant=True,
    )
