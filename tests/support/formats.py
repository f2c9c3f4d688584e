"""Formats of weights and keys in plain torch: what kernels are compared with."""

from dataclasses import replace

import torch
from torch import Tensor

from support.triton_interpreter import turn_on

turn_on()

from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.linear.linear import dequantize
from llmbox.kernels.triton.linear.weight_packing import pack_grouped
from support.fake_quantized import fake_quantized_ops


def plain_torch(quant: Quant | None) -> Ops:
    if quant is None or not quant.on_cpu:
        return fake_quantized_ops(quant)

    def wide(weight_OI: Tensor, rounding: Quant) -> Tensor:
        return dequantize(pack_grouped(weight_OI, rounding), torch.float32)

    table = lambda weight, tied: REFERENCE.pack_embedding(wide(weight, quant.head) if tied else weight, tied)  # noqa: E731
    return replace(
        REFERENCE,
        pack_linear=lambda weight, bias: REFERENCE.pack_linear(wide(weight, quant), bias),
        pack_head=lambda weight, bias: REFERENCE.pack_head(wide(weight, quant.head), bias),
        pack_embedding=table,
    )


def cached_in(ops: Ops, kv_dtype: torch.dtype | None) -> Ops:
    """Whatever estimates allow on a CPU."""
    make = ops.make_kv_cache
    changed = lambda shape, device: make(replace(shape, dtype=kv_dtype or shape.dtype), device)  # noqa: E731
    return replace(ops, make_kv_cache=changed)
