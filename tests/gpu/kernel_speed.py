"""Each kernel's time against its roofline and against torch, on shapes of an 8B model.

A floor is bytes over the measured copy bandwidth or operations over the measured rate of products, whichever
takes longer. Inputs are random and rotate, so that no call finds its own in the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu import fp8_products
from gpu.timing import Call, times
from gpu.variants import row_format_at_load
from llmbox.kernels.op_types import BatchLayout, KVShape
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.attention import attention_metadata as attention_plan
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.elementwise import gate_rows, norm_rows
from llmbox.kernels.triton.linear import fused_moe as gemm_experts
from llmbox.kernels.triton.linear.linear import Fp8BlockLinear, Fp8Linear, WeightOnlyIntLinear, dequantize
from llmbox.kernels.triton.linear.quantize_activations import quantize_rows
from llmbox.kernels.triton.linear.tile_config import has_fp8

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 12288, 32, 8, 128, 151936
DEVICE = torch.device("cuda")
MANY = 128
"""Rows from which on integer weights might as well be made wide first."""
SETS_BYTES = 256 << 20
"""All sets of inputs together: several times any cache."""


@dataclass(frozen=True, slots=True)
class Speed:
    name: str
    ms: float
    floor_ms: float
    other: str
    """What torch needs for the same: name and milliseconds."""

    @property
    def reached(self) -> float:
        return self.floor_ms / self.ms


@dataclass(frozen=True, slots=True)
class Work:
    """`variants`: ours first. Each is made for one set of inputs by its index."""

    name: str
    bytes_moved: float
    operations: float
    rate: str
    variants: dict[str, Sequence[Call]]


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def measure(work: Work, peaks: dict[str, float]) -> Speed:
    spent = times(work.variants)
    (_, ms), *others = spent.items()
    rate = peaks.get(work.rate, peaks["bf16"])
    floor = max(work.bytes_moved / peaks["bytes"], work.operations / rate) * 1e3
    shown = ", ".join(f"{name} {value:.4f}" for name, value in others)
    return Speed(work.name, ms, floor, shown)


def all_work() -> Iterator[Callable[[], Work]]:
    for batch, context in ((1, 8192), (8, 4096), (64, 2048), (256, 1536), (256, 4096)):
        yield partial(decode, batch, context, BF16)
    for kv_dtype in (torch.int8, FP8) if has_fp8(DEVICE) else (torch.int8,):
        for batch, context in ((1, 8192), (256, 1536)):
            yield partial(decode, batch, context, kv_dtype)
    yield partial(decode, 256, 1536, BF16, deterministic=True)
    for tokens, past in ((2048, 0), (8192, 0), (2048, 6144), (32768, 0)):
        yield partial(prefill, tokens, past)
    for rows in (1, 16, 64, 256, 4096):
        floats = ["fp8", "fp8-static", "fp8-block"] if has_fp8(DEVICE) else []
        for quant in (None, "int8", "int4", "w8a8", *floats):
            yield partial(linear, rows, quant)
    for rows in (64, 8192):
        yield partial(norm, rows)
        yield partial(gates, rows)
        for quant in ("w8a8", "fp8", "fp8-block") if has_fp8(DEVICE) else ("w8a8",):
            yield partial(norm_in_8_bits, rows, quant)
            yield partial(gates_in_8_bits, rows, quant)
        yield partial(heads, rows)
    for each in (1, 64):
        for quant in (None, "int8", "int4", "w8a8", *(["fp8"] if has_fp8(DEVICE) else [])):
            yield partial(experts, each, quant)


def paged(batch: int, context: int, rows: int, kv_dtype: torch.dtype, deterministic: bool) -> tuple:
    """Ops, cache, plan of the `rows` last tokens of each context, and layers enough to rotate."""
    ops = triton_ops(DEVICE, BF16, deterministic=deterministic)
    blocks = -(-context // 16)
    size = 2 * batch * context * KV_HEADS * HEAD_DIM * kv_dtype.itemsize
    layers = max(1, min(4, SETS_BYTES // size))
    shape = KVShape(layers, batch * blocks, 16, KV_HEADS, HEAD_DIM, kv_dtype, BF16)
    cache = ops.make_kv_cache(shape, DEVICE)
    for layer in range(layers):
        for tensor in (cache.k[layer], cache.v[layer]):
            for part in tensor.split(4096):
                numbers = torch.randn(part.shape, device=DEVICE)
                part.copy_(numbers if kv_dtype == BF16 else (30 * numbers).clamp_(-120, 120))
    cache.k_scale.fill_(0.03), cache.v_scale.fill_(0.03)
    tables = torch.randperm(batch * blocks, device=DEVICE).int().view(batch, blocks)
    position = torch.arange(context - rows, context, device=DEVICE).int().repeat(batch)
    ragged = BatchLayout(
        block_size=16,
        query_lens=[rows] * batch,
        contexts=[context] * batch,
        query_starts_N1=torch.arange(batch + 1, device=DEVICE).int() * rows,
        context_lens_N=torch.full((batch,), context, device=DEVICE).int(),
        block_tables_NB=tables,
        positions_T=position,
        slots_T=torch.zeros_like(position),
    )
    return ops, cache, ops.plan_attention(ragged, cache, None), layers


def decode(batch: int, context: int, kv_dtype: torch.dtype, *, deterministic: bool = False) -> Work:
    ops, cache, plan, layers = paged(batch, context, 1, kv_dtype, deterministic)
    q, scale = randn(batch, HEADS, HEAD_DIM), HEAD_DIM**-0.5
    name = f"attention, decode {batch} x {context}, KV {str(kv_dtype)[6:]}{', fixed' * deterministic}"
    variants = {"ours": [partial(ops.attention, q, cache, layer, plan, scale) for layer in range(layers)]}
    if not deterministic and batch > 1:  # in how many pieces contexts are best cut
        for waves in (attention_plan.WAVES // 2, 2 * attention_plan.WAVES):
            variants[f"{waves} programs a multiprocessor"] = [
                partial(with_waves, waves, call) for call in variants["ours"]
            ]
    if not deterministic and batch * context <= 1 << 19:
        k, v = (randn(batch, KV_HEADS, context, HEAD_DIM) for _ in "kv")
        variants["SDPA, contiguous" + " bf16" * (kv_dtype != BF16)] = [
            partial(F.scaled_dot_product_attention, q.unsqueeze(2), k, v, scale=scale, enable_gqa=True)
        ]
    scales = 0 if kv_dtype == BF16 else 4
    moved = 2 * batch * context * KV_HEADS * (HEAD_DIM * kv_dtype.itemsize + scales)
    return Work(name, moved, 4 * batch * context * HEADS * HEAD_DIM, "bf16", variants)


def with_waves(waves: int, call: Call) -> object:
    with mock.patch.object(attention_plan, "WAVES", waves):
        return call()


def prefill(tokens: int, past: int) -> Work:
    context = tokens + past
    ops, cache, plan, layers = paged(1, context, tokens, BF16, deterministic=False)
    q, scale = randn(tokens, HEADS, HEAD_DIM), HEAD_DIM**-0.5
    variants = {"ours": [partial(ops.attention, q, cache, layer, plan, scale) for layer in range(layers)]}
    gathering = triton_ops(DEVICE, BF16, sdpa_from=2).plan_attention(plan.ragged, cache, None)
    variants["SDPA, gathered"] = [
        partial(ops.attention, q, cache, layer, gathering, scale) for layer in range(layers)
    ]
    if not past:
        k, v = (randn(1, KV_HEADS, context, HEAD_DIM) for _ in "kv")
        wide = q.transpose(0, 1).unsqueeze(0).contiguous()
        attend = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
        variants["SDPA, contiguous"] = [partial(attend, wide, k, v)]
    operations = 4 * HEADS * HEAD_DIM * (tokens * past + tokens * tokens / 2)
    moved = 2 * (context * KV_HEADS + tokens * HEADS) * HEAD_DIM * 2
    return Work(f"attention, prompt of {tokens} after {past}", moved, operations, "bf16", variants)


def linear(rows: int, quant: str | None) -> Work:
    """The MLP's first product. Weights rotate."""
    outputs, rounding = 2 * FFN, QUANTS.get(quant or "")
    ops = triton_ops(DEVICE, BF16, rounding)
    weight = randn(outputs, HIDDEN)
    bits = 16 if rounding is None else 8 * rounding.bytes_per_weight
    sets = max(1, min(4, int(SETS_BYTES // (weight.numel() * bits / 8))))
    packed = [fp8_products.pack(ops, rounding, weight.clone()) for _ in range(sets)]
    x, refused = randn(rows, HIDDEN), ""
    variants: dict[str, Sequence[Call]] = {"ours": [partial(ops.linear, one, x) for one in packed]}
    if rounding is not None:
        plain = [weight, weight.clone()]
        variants["bf16 cuBLAS"] = [partial(F.linear, x, one) for one in plain]
    match packed[0]:
        case Fp8Linear() | Fp8BlockLinear():
            ways, refused = fp8_products.both_ways(x, packed)
            variants |= ways
        case WeightOnlyIntLinear() if rows > MANY:
            made_wide = lambda one: F.linear(x, dequantize(one.weight, BF16))  # noqa: E731
            variants["made wide, cuBLAS"] = [partial(made_wide, one) for one in packed]
    moved = weight.numel() * bits / 8 + 2 * rows * (HIDDEN + outputs)
    rate = "fp8" if rounding is not None and rounding.kind != "integer" else "bf16"
    name = f"linear {HIDDEN} -> {outputs}, {rows} rows, {quant or 'bf16'}"
    if refused:
        name += f" (not by torch: {refused[:60]})"
    return Work(name, moved, 2 * rows * weight.numel(), rate, variants)


def norm(rows: int) -> Work:
    ops, weight = triton_ops(DEVICE, BF16), randn(HIDDEN)
    sets = [(randn(rows, HIDDEN), randn(rows, HIDDEN)) for _ in range(4)]
    variants = {
        "ours": [partial(ops.add_rms_norm, x, y, weight, 1e-6) for x, y in sets],
        "eager": [partial(REFERENCE.add_rms_norm, x, y, weight, 1e-6) for x, y in sets],
    }
    return Work(f"add_rms_norm, {rows} rows", 4 * rows * HIDDEN * 2, 0, "bf16", variants)


def norm_in_8_bits(rows: int, quant: str) -> Work:
    """The norm and what the next linear multiplies, at once and one after the other."""
    weight, row_format = randn(HIDDEN), row_format_at_load(QUANTS[quant])
    sets = [(randn(rows, HIDDEN), randn(rows, HIDDEN)) for _ in range(4)]
    apart = lambda x, y: quantize_rows(norm_rows(x, y, weight, 1e-6, None)[0], row_format)  # noqa: E731
    variants = {
        "ours": [partial(norm_rows, x, y, weight, 1e-6, row_format) for x, y in sets],
        "two passes": [partial(apart, x, y) for x, y in sets],
    }
    name = f"add_rms_norm, {rows} rows, left for {quant} too"
    return Work(name, 9 * rows * HIDDEN, 0, "bf16", variants)


def gates_in_8_bits(rows: int, quant: str) -> Work:
    row_format = row_format_at_load(QUANTS[quant])
    sets = [randn(rows, 2 * FFN) for _ in range(4)]
    apart = lambda x: quantize_rows(gate_rows(x, "silu", None)[0], row_format)  # noqa: E731
    variants = {
        "ours": [partial(gate_rows, x, "silu", row_format) for x in sets],
        "two passes": [partial(apart, x) for x in sets],
    }
    return Work(f"gate_mul, {rows} rows, left for {quant} too", 7 * rows * FFN, 0, "bf16", variants)


def gates(rows: int) -> Work:
    ops = triton_ops(DEVICE, BF16)
    sets = [randn(rows, 2 * FFN) for _ in range(4)]
    variants = {
        "ours": [partial(ops.gate_mul, x, "silu") for x in sets],
        "eager": [partial(REFERENCE.gate_mul, x, "silu") for x in sets],
    }
    return Work(f"gate_mul, {rows} rows", 3 * rows * FFN * 2, 0, "bf16", variants)


def heads(rows: int) -> Work:
    ops, cache, plan, _ = paged(rows, 16, 1, BF16, deterministic=False)
    total = HEADS + 2 * KV_HEADS
    weight = randn(HEADS + KV_HEADS, HEAD_DIM)
    cos, sin = randn(rows, HEAD_DIM, dtype=torch.float32), randn(rows, HEAD_DIM, dtype=torch.float32)
    sets = [randn(rows, total, HEAD_DIM) for _ in range(4)]
    run = lambda x: ops.rotate_and_write(x, weight, 1e-6, cos, sin, cache, 0, plan)  # noqa: E731
    block = torch.arange(rows, device=DEVICE)

    def eager(x: Tensor) -> Tensor:
        qk = REFERENCE.rotary(REFERENCE.rms_norm(x[:, : HEADS + KV_HEADS], weight, 1e-6), cos, sin)
        cache.k[0, block, :, 0], cache.v[0, block, :, 0] = qk[:, HEADS:], x[:, HEADS + KV_HEADS :]
        return qk

    variants = {"ours": [partial(run, x) for x in sets], "eager": [partial(eager, x) for x in sets]}
    moved = rows * HEAD_DIM * (2 * total * 2 + 8)
    return Work(f"norm, rotate and write heads, {rows} rows", moved, 0, "bf16", variants)


def experts(each: int, quant: str | None) -> Work:
    """64 experts of so many rows."""
    count, inputs, outputs = 64, 2048, 1536
    weight, x = randn(count, outputs, inputs), randn(count * each, inputs)
    ops = triton_ops(DEVICE, BF16, QUANTS.get(quant or ""))
    assert ops.pack_experts is not None
    packed = ops.pack_experts(weight.flatten(0, 1), None)
    starts = (torch.arange(count + 1, device=DEVICE) * each).int()
    variants: dict[str, Sequence[Call]] = {
        "ours": [partial(gemm_experts.experts_product, x, packed, starts)],
        "bmm in bf16": [partial(torch.bmm, x.view(count, each, inputs), weight.transpose(1, 2))],
    }
    width = QUANTS[quant].bytes_per_weight if quant else 2
    moved = int(width * weight.numel()) + 2 * x.nbytes
    rate = "fp8" if quant in {"fp8", "w8a8"} else "bf16"
    name = f"experts in {quant or 'bf16'}: {count} of {each} rows"
    return Work(name, moved, 2 * count * each * inputs * outputs, rate, variants)
