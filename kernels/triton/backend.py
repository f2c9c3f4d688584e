"""`Ops` on the Triton kernels, for one model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..activation import XIELU, Activation, LimitedSwiGLU
from ..op_types import BatchLayout
from ..ops import Ops, StepInputs
from ..quant_formats import OF_LAYERS, UNQUANTIZED_KINDS, Kind, Quant
from ..reference.elementwise import concat, layer_norm
from ..weight_packing import QuantizedWeight
from . import elementwise
from .attention import attention, kv_cache
from .attention import qk_norm_rope_kv_write as heads
from .attention.attention_metadata import TritonAttentionMetadata, plan_attention
from .attention.text_attention import attend_texts
from .elementwise import softcap
from .linear import linear
from .linear.fused_moe import experts
from .linear.gemm import linear_by_head
from .linear.linear import (
    DenseLinear,
    Fp8BlockLinear,
    Fp8Linear,
    FusedActivationQuant,
    Linear,
    W8A8Linear,
    WeightOnlyIntLinear,
)
from .linear.lora import TritonLora
from .linear.quantize_activations import RowFormat, Rows8
from .linear.scaled_mm_choice import ScaledMMSelector
from .linear.tile_config import ROW_COUNTS, has_fp8
from .linear.weight_packing import group_codes, pack_fp8, pack_fp8_blocks, pack_grouped, scales_of_blocks
from .recurrent import recurrent_ops
from .sampling.penalties import count_last_tokens
from .sampling.sample import prepare_decode_inputs, sample

FP8 = torch.float8_e4m3fn


def triton_ops(
    device: torch.device,
    dtype: torch.dtype,
    quant: Quant | None = None,
    *,
    deterministic: bool = False,
    portable: bool = False,
    sdpa_from: int | None = None,
    scaled_mm: bool = True,
) -> Ops:
    """Build `Ops`. `dtype` is the model's. `deterministic`: a row's bits never depend on its neighbors.
    `portable`: nor are they others than those of the C++ kernels, see `portable/`.

    `sdpa_from`: prompt length from which PyTorch computes attention; `scaled_mm`: PyTorch may multiply FP8
    matrices. Both are ignored with `deterministic`.
    """
    if portable:
        from .portable import make_portable  # noqa: PLC0415 - few engines take these

        return make_portable(TritonBackend(dtype, quant, fixed=True), device)
    scaled_mm = scaled_mm and not deterministic
    return TritonBackend(dtype, quant, fixed=deterministic, sdpa_from=sdpa_from, scaled_mm=scaled_mm).ops(
        device
    )


@dataclass
class TritonBackend:
    """Triton backend: `Ops` whose norms, gates and attention can also write quantized rows (`Ops.before`)."""

    dtype: torch.dtype
    quant: Quant | None
    fixed: bool
    sdpa_from: int | None = None
    scaled_mm: bool = False

    def __post_init__(self) -> None:
        self._left = FusedActivationQuant()
        self._choice = ScaledMMSelector(self.dtype)

    def ops(self, device: torch.device) -> Ops:
        formats = [torch.float32, torch.bfloat16, torch.float16, torch.int8] + [FP8] * has_fp8(device)
        return Ops(
            name="triton" if self.quant is None else f"triton, {self.quant.name} weights",
            pack_embedding=self.pack_embedding,
            embedding=self.embedding,
            pack_linear=self.pack_linear,
            pack_head=self.pack_head,
            pack_router=DenseLinear,
            pack_experts=self.pack_experts,
            linear=self.linear,
            logits=self.linear,
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            fused_norm=self.fused_norm,
            writing_rows_for=self.writing_rows_for,
            layer_norm=layer_norm,
            scale=Tensor.mul_,
            rotary=heads.rotary,
            gate_mul=self.gate_mul,
            softcap=softcap,
            concat=concat,
            linear_by_head=partial(linear_by_head, fixed=self.fixed),
            stack_heads=stack_heads,
            experts=partial(experts, fixed=self.fixed),
            make_kv_cache=kv_cache.make_kv_cache,
            plan_attention=self.plan_attention,
            write_kv=heads.write_kv,
            attention=self.attention,
            copy_blocks=kv_cache.copy_blocks,
            clear_blocks=kv_cache.clear_blocks,
            block_tensors=lambda cache: cache.tensors,
            graph=same,
            kv_dtypes=frozenset(formats),
            row_invariant=self.fixed,
            rotate_and_write=heads.rotate_and_write,
            attend_texts=attend_texts,
            sample=sample,
            count_last_tokens=count_last_tokens,
            prepare_decode_inputs=prepare_decode_inputs,
            warmup_batch_sizes=ROW_COUNTS,
            recurrent=recurrent_ops(fixed=self.fixed),
            lora=TritonLora(device).ops(),
            stored=None if self.quant is None else self,
        )

    def pack_embedding(self, weight_VE: Tensor, tied: bool) -> Linear:
        return self.pack_head(weight_VE, None) if tied else DenseLinear(weight_VE, None)

    def embedding(self, table: Linear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
        return linear.embed(table, ids_T, self.dtype, scale)

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None) -> Linear:
        return self._chosen(pack(weight_VE, bias_V, self.format("head")))

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self._chosen(pack(weight_OI, bias_O, self.quant))

    def format(self, kind: Kind) -> Quant | None:
        """Implement `StoredWeights`."""
        if (
            self.quant is None
            or kind in UNQUANTIZED_KINDS
            or (kind not in OF_LAYERS and self.quant.keeps_head)
        ):
            return None
        return self.quant if kind in OF_LAYERS else self.quant.head

    def pack_experts(self, weights: Tensor | QuantizedWeight, biases: Tensor | None) -> Linear:
        """Pack the weights of all experts for `experts_product`, which never uses PyTorch's FP8 kernels."""
        if isinstance(weights, QuantizedWeight):
            return pack_quantized(weights, biases)
        return pack(weights, biases, self.quant)

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> Linear:
        """Implement `StoredWeights`."""
        assert dtype == self.dtype
        return self._chosen(pack_quantized(rounded, bias_O))

    def linear(self, packed: Linear, x_TI: Tensor) -> Tensor:
        return linear.multiply(packed, x_TI, self._left.rows_for(packed, x_TI), fixed=self.fixed)

    def writing_rows_for(self, ops: Ops, reader: Linear) -> Ops:
        """Implement `Ops.before`: norms, gates and attention also write 8-bit rows for `reader`."""
        row_format = linear.row_format_of(reader)
        if row_format is None:
            return ops
        return replace(
            ops,
            rms_norm=partial(self.rms_norm, row_format=row_format),
            add_rms_norm=partial(self.add_rms_norm, row_format=row_format),
            fused_norm=partial(self.fused_norm, row_format=row_format),
            gate_mul=partial(self.gate_mul, row_format=row_format),
            attention=partial(self.attention, row_format=row_format),
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, row_format: RowFormat | None = None
    ) -> Tensor:
        if weight.dim() == 2:
            return elementwise.norm_heads(x, weight, eps)
        return self._left.keep(*elementwise.norm_rows(x, None, weight, eps, row_format), row_format)

    def add_rms_norm(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        *,
        row_format: RowFormat | None = None,
    ) -> Tensor:
        rows = elementwise.norm_rows(x_TE, residual_TE, weight_E, eps, row_format)
        return self._left.keep(*rows, row_format)

    def fused_norm(
        self,
        norm: Callable[[RowFormat | None], tuple[Tensor, Rows8 | None]],
        *,
        row_format: RowFormat | None = None,
    ) -> Tensor:
        return self._left.keep(*norm(row_format), row_format)

    def gate_mul(
        self,
        gate_up_T2F: Tensor,
        activation: Activation | LimitedSwiGLU | XIELU,
        *,
        row_format: RowFormat | None = None,
    ) -> Tensor:
        if isinstance(activation, XIELU):
            row_format = None
        return self._left.keep(*elementwise.gate_rows(gate_up_T2F, activation, row_format), row_format)

    def plan_attention(
        self, ragged: BatchLayout, cache: kv_cache.TritonKVCache, window: int | None
    ) -> TritonAttentionMetadata:
        return plan_attention(ragged, cache, window, fixed=self.fixed, sdpa_from=self.sdpa_from)

    def attention(
        self,
        q_THD: Tensor,
        cache: kv_cache.TritonKVCache,
        layer: int,
        plan: TritonAttentionMetadata,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
        *,
        row_format: RowFormat | None = None,
    ) -> Tensor:
        rows = attention.attend_rows(q_THD, cache, layer, plan, scale, row_format, softcap, sinks_H)
        return self._left.keep(*rows, row_format)

    def _chosen(self, packed: Linear) -> Linear:
        return self._choice.of(packed) if self.scaled_mm else packed


def pack(weight_OI: Tensor, bias_O: Tensor | None, quant: Quant | None) -> Linear:
    if quant is None:
        return DenseLinear(weight_OI, bias_O)
    assert quant.kind != "given", "its scales of activations come with a checkpoint"
    if quant.kind == "float":
        return Fp8Linear(*pack_fp8(weight_OI), bias_O)
    if quant.kind == "blocks":
        return Fp8BlockLinear(*pack_fp8_blocks(weight_OI), bias_O)
    weight = pack_grouped(weight_OI, quant)
    return W8A8Linear(weight, bias_O) if quant.kind == "rows" else WeightOnlyIntLinear(weight, bias_O)


def pack_quantized(rounded: QuantizedWeight, bias_O: Tensor | None) -> Linear:
    """Pack weights that a checkpoint holds quantized."""
    quant, codes_OI = rounded.quant, rounded.codes_OI
    if quant.by_output:
        scales = rounded.scales_OG.contiguous()
        one_1 = scales[0].clone() if bool((scales == scales[0]).all()) else None
        return Fp8Linear(codes_OI, scales, bias_O, rounded.given, one_1)
    if quant.kind == "blocks":
        return Fp8BlockLinear(codes_OI, scales_of_blocks(rounded.scales_OG), bias_O)
    weight = group_codes(rounded)
    if quant.kind == "rows":
        return W8A8Linear(weight, bias_O)
    return WeightOnlyIntLinear(weight, bias_O, rounded.order_I)


def stack_heads(linears: Sequence[DenseLinear]) -> Tensor:
    return torch.stack([each.weight_OI for each in linears])


def same(
    body: Callable[[StepInputs], tuple[Tensor, ...]],
) -> Callable[[StepInputs], tuple[Tensor, ...]]:
    """Return `body` unchanged: the runner captures whole decode steps, nothing is recorded here."""
    return body


def why_it_fails(device: torch.device) -> str | None:
    """Compile and run the smallest kernel. Return the failure in one line, or None.

    Triton needs a C compiler, Python's headers and the driver's library.
    """
    try:
        result = elementwise.gate_mul(torch.ones(1, 32, device=device), "silu").tolist()
    except Exception as error:  # noqa: BLE001 - compilers, linkers and drivers each have their own
        lines = str(error).strip().splitlines() or [""]
        return f"a first kernel failed: {type(error).__name__}: {lines[0][:200]}"
    right = all(abs(x - 0.7310586) < 1e-5 for x in result[0])
    return None if right else "a first kernel computed something else than it should"
