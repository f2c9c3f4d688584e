"""The GPU formats in plain torch: linears with 8-bit rows and weights, and FP8 keys and values.

Quality is measured with it where there is no GPU, and kernels are compared with it.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import UNQUANTIZED_KINDS, Kind, Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.reference.elementwise import ReferenceLinear, linear
from llmbox.kernels.reference.elementwise import embedding as wide_embedding
from llmbox.kernels.reference.kv_cache import FP8, LARGEST, quantize_dynamic
from llmbox.kernels.reference.moe import ExpertLayer
from llmbox.kernels.weight_packing import QuantizedWeight


def fake_quantize_static(rows: Tensor, given: Tensor) -> Tensor:
    """Quantize to E4M3 with the static scale `given`, float32 [1], and dequantize to float32.

    Larger numbers saturate. A row that is not finite becomes NaN.
    """
    rows = rows.float()
    codes = (rows * (1 / given)).clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8)
    return torch.where(rows.isfinite().all(-1, keepdim=True), codes.float() * given, torch.nan)


def fake_quantize(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize dynamically and dequantize to float32."""
    codes, scales = quantize_dynamic(rows, dtype)
    return codes.float() * scales.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    wide: ReferenceLinear
    """Dequantized weights, float32."""
    dtype: torch.dtype
    """dtype of the model."""
    rows: torch.dtype | None
    """dtype that input rows are quantized to and dequantized from; None: they stay unquantized."""
    group: int | None
    """Inputs of a row that share a scale; None: all of them."""
    given: Tensor | None = None
    """Static input scale, where the checkpoint has one."""


def fake_quantized_ops(quant: Quant | None, kv_dtype: torch.dtype | None = None) -> Ops:
    """REFERENCE with linears of `quant`, a GPU format. `kv_dtype` replaces the KV cache's dtype."""
    ops = REFERENCE
    if quant is not None:
        assert not quant.on_cpu
        ops = replace(
            ops,
            name=f"reference, {quant.name} weights",
            pack_linear=lambda weight_OI, bias_O: pack(weight_OI, bias_O, quant),
            pack_head=lambda weight_VE, bias_V: pack_head(weight_VE, bias_V, quant),
            pack_embedding=lambda weight_VE, tied: pack_table(weight_VE, tied, quant),
            embedding=embedding,
            stored=StoredQuantized(quant) if quant.is_float else None,
            linear=quantized_linear,
            experts=ExpertLayer(quantized_linear).experts,
            expert_results=ExpertLayer(quantized_linear).expert_results,
            logits=quantized_linear,
        )
    if kv_dtype is None:
        return ops
    return replace(
        ops,
        name=f"{ops.name}, {str(kv_dtype).removeprefix('torch.')} keys and values",
        make_kv_cache=lambda shape, device: REFERENCE.make_kv_cache(replace(shape, dtype=kv_dtype), device),
    )


@dataclass(frozen=True, slots=True)
class StoredQuantized:
    """`StoredWeights` of FP8."""

    quant: Quant

    def format(self, kind: Kind) -> Quant | None:
        if kind == "linear":
            return self.quant
        return None if kind in UNQUANTIZED_KINDS or self.quant.keeps_head else self.quant.head

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> QuantizedLinear:
        wide = ReferenceLinear(rounded.floats(), None if bias_O is None else bias_O.float())
        group = None if rounded.quant.by_output else rounded.quant.group
        return QuantizedLinear(wide, dtype, FP8, group, rounded.given)


def pack(weight_OI: Tensor, bias_O: Tensor | None, quant: Quant) -> QuantizedLinear:
    rows = torch.int8 if quant.kind == "rows" else FP8
    group = None if quant.by_output else quant.group
    return rounded(weight_OI, bias_O, quant, rows, group)


def pack_head(weight_VE: Tensor, bias_V: Tensor | None, quant: Quant) -> QuantizedLinear | ReferenceLinear:
    if quant.keeps_head:
        return REFERENCE.pack_head(weight_VE, bias_V)  # type: ignore[no-any-return] # packed weights have no type
    if quant.kind == "rows":  # the head of this format has unquantized inputs
        return rounded(weight_VE, bias_V, quant, None, None)
    return pack(weight_VE, bias_V, quant)


def pack_table(weight_VE: Tensor, tied: bool, quant: Quant) -> QuantizedLinear | ReferenceLinear:
    return pack_head(weight_VE, None, quant) if tied else ReferenceLinear(weight_VE, None)


def rounded(
    weight_OI: Tensor, bias_O: Tensor | None, quant: Quant, rows: torch.dtype | None, group: int | None
) -> QuantizedLinear:
    wide = ReferenceLinear(
        fake_quantize_weights(weight_OI, quant), None if bias_O is None else bias_O.float()
    )
    return QuantizedLinear(wide, weight_OI.dtype, rows, group)


def quantized_linear(packed: QuantizedLinear | ReferenceLinear, x_TI: Tensor) -> Tensor:
    """Multiply in float32 and round once."""
    if isinstance(packed, ReferenceLinear):
        return linear(packed, x_TI)
    if packed.given is not None:
        wide_TI = fake_quantize_static(x_TI, packed.given)
    else:
        wide_TI = x_TI.float() if packed.rows is None else fake_quantize_rows(x_TI, packed.rows, packed.group)
    return linear(packed.wide, wide_TI).to(packed.dtype)


def embedding(table: QuantizedLinear | ReferenceLinear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
    if isinstance(table, ReferenceLinear):
        return wide_embedding(table, ids_T, scale)
    return (F.embedding(ids_T, table.wide.weight_OI) * scale).to(table.dtype)


def fake_quantize_rows(x_TI: Tensor, dtype: torch.dtype, group: int | None) -> Tensor:
    """Float32."""
    inputs = x_TI.shape[1]
    return fake_quantize(grouped(x_TI, group or inputs), dtype).flatten(1)[:, :inputs]


def fake_quantize_weights(weight_OI: Tensor, quant: Quant) -> Tensor:
    """Float32."""
    assert quant.kind != "given", "its scales come with a checkpoint"
    outputs, inputs = weight_OI.shape
    match quant.kind:
        case "float":
            return fake_quantize(weight_OI, FP8)
        case "blocks":
            tall = F.pad(weight_OI, (0, 0, 0, -outputs % quant.group))
            across = grouped(tall, quant.group)
            blocks = across.view(-1, quant.group, *across.shape[1:]).transpose(1, 2)
            wide = fake_quantize(blocks.flatten(2), FP8).view(blocks.shape)
            return wide.transpose(1, 2).reshape(len(tall), -1)[:outputs, :inputs].contiguous()
    groups = grouped(weight_OI, quant.group).float()
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST[torch.int8]).half().float()
    codes = (groups / torch.where(scales > 0, scales, 1)).round().clamp(-128, 127)
    return (codes * scales).flatten(1)[:, :inputs].contiguous()


def stored_nibbles(packed_GOw: Tensor) -> Tensor:
    """Read the nibbles of the GPU's kernels in the order of the inputs, uint8 [groups, outputs, group].

    A byte holds inputs i and i + group / 2; of each four bytes the second and third are exchanged.
    """
    bytes_GOw = packed_GOw.view(*packed_GOw.shape[:2], -1, 4)[..., [0, 2, 1, 3]].flatten(2)
    return torch.cat((bytes_GOw & 15, bytes_GOw >> 4), -1)


def grouped(x_TI: Tensor, group: int) -> Tensor:
    """Reshape to [T, inputs / group, group], the last group padded with zeros."""
    rows, inputs = x_TI.shape
    return F.pad(x_TI, (0, -inputs % group)).view(rows, -(-inputs // group), group)
