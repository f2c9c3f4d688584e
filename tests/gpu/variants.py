"""What real models ask of the kernels, on tensors of a CPU: for `compile.py`, which runs none of it."""

from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from llmbox.engine.distributed.fused_allreduce_rmsnorm_kernel import Peers, sum_norm_rows
from llmbox.kernels.activation import XIELU, LimitedSwiGLU
from llmbox.kernels.op_types import BatchLayout, KVShape
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.sampling_types import DecodeInputs, DecodeRows, PenaltyState, SampleRows
from llmbox.kernels.triton.attention.attention import attend_rows
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.elementwise import gate_rows, norm_rows
from llmbox.kernels.triton.linear import gemm
from llmbox.kernels.triton.linear import gemm_w8a8 as gemm_8_bits
from llmbox.kernels.triton.linear.fused_moe import experts_product
from llmbox.kernels.triton.linear.linear import FP8_BLOCKS, FP8_ROWS, dequantize
from llmbox.kernels.triton.linear.quantize_activations import RowFormat, quantize_rows
from llmbox.kernels.triton.linear.weight_packing import pack_grouped
from support.paged import ragged_rows

CPU = torch.device("cpu")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I8, I32, I64, FP8 = torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn
HIDDEN, FFN, VOCAB = 4096, 12288, 151936
Heads = tuple[int, int]
"""Query and kv heads."""


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(
    kv_dtype: torch.dtype | None = None,
    *,
    dtype: torch.dtype = BF16,
    heads: Heads = (32, 8),
    head_dim: int = 128,
    window: int | None = None,
    deterministic: bool = False,
    blocks: Sequence[int] = (30, 128),
    leaves: RowFormat | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    spans: bool = False,
) -> None:
    """Steps of two decoding rows and a prompt of 30; contexts may have as many blocks as that says. `leaves`:
    rows of 8 bits beside the result. `spans`: rows of pictures see each other.
    """
    ops = triton_ops(CPU, dtype, deterministic=deterministic)
    query, kv = heads
    cache = ops.make_kv_cache(KVShape(2, 64, 16, kv, head_dim, kv_dtype or dtype, dtype), CPU)
    qkv, norm = zeros(32, query + 2 * kv, head_dim, dtype=dtype), zeros(query + kv, head_dim, dtype=dtype)
    angles = zeros(32, head_dim, dtype=F32)
    for width in blocks:
        ragged = BatchLayout(
            16,
            [1, 1, 30],
            [16 * width - 5, 20, 30],
            zeros(4, dtype=I32),
            zeros(3, dtype=I32),
            zeros(3, width, dtype=I32),
            zeros(32, dtype=I32),
            zeros(32, dtype=I32),
            spans_N=zeros(3, dtype=I32) if spans else None,
        )
        plan = ops.plan_attention(ragged, cache, window)
        for weight in (norm, None):
            q = ops.rotate_and_write(qkv, weight, 1e-6, angles, angles, cache, 1, plan)
        attend_rows(q, cache, 1, plan, 0.1, leaves, softcap, zeros(query, dtype=F32) if sinks else None)
    ops.write_kv(cache, 1, qkv[:, :kv], qkv[:, kv : 2 * kv], plan)
    ops.copy_blocks(cache, [(1, 2)])


def latents(
    kv_dtype: torch.dtype | None = None,
    *,
    heads: int = 128,
    deterministic: bool = False,
    dtype: torch.dtype = BF16,
) -> None:
    """As `attention`, of the latents of DeepSeek V3, and what is before and behind it."""
    ops = triton_ops(CPU, dtype, deterministic=deterministic)
    cache = ops.make_kv_cache(KVShape(2, 64, 16, 1, 576, kv_dtype or dtype, dtype, latent=512), CPU)
    ints = [zeros(4, dtype=I32), zeros(3, dtype=I32), zeros(3, 128, dtype=I32), *[zeros(32, dtype=I32)] * 2]
    plan = ops.plan_attention(BatchLayout(16, [1, 1, 30], [2043, 20, 30], *ints), cache, None)
    row = zeros(32, 1, 576, dtype=dtype)
    ops.write_kv(cache, 1, row, row, plan)
    ops.copy_blocks(cache, [(1, 2)])
    attend_rows(zeros(32, heads, 576, dtype=dtype), cache, 1, plan, 0.1, None)
    keys = ops.stack_heads([ops.pack_router(zeros(512, 128, dtype=dtype), None)] * 2)
    for count in (1, 17):
        ops.linear_by_head(keys, zeros(count, 2, 128, dtype=dtype))
    ops.rms_norm(zeros(3, 1, 1536, dtype=dtype), zeros(1, 1536, dtype=dtype), 1e-6)


def texts(head_dim: int = 64, dtype: torch.dtype = BF16) -> None:
    """Attention of encoders, with and without a window."""
    ops = triton_ops(CPU, dtype)
    assert ops.attend_texts is not None
    q, k, v = zeros(30, 36, head_dim, dtype=dtype).split(12, 1)
    for reach in (None, 64):
        ops.attend_texts(q, k, v, zeros(3, dtype=I32), 0.1, reach)


def linears(
    quant: str | None,
    rows: Sequence[int],
    *,
    dtype: torch.dtype = BF16,
    inputs: int = HIDDEN,
    deterministic: bool = False,
) -> None:
    """With a bias; split among programs as 64 outputs are."""
    ops = triton_ops(CPU, dtype, QUANTS.get(quant or ""), deterministic=deterministic)
    packed = ops.pack_linear(zeros(64, inputs, dtype=dtype), zeros(64, dtype=dtype))
    for number in rows:
        ops.linear(packed, zeros(number, inputs, dtype=dtype))


def whole_linears(quant: str | None, rows: Sequence[int], *, deterministic: bool = False) -> None:
    """Of so many outputs that the inputs are not split, with a bias and without."""
    ops = triton_ops(CPU, BF16, QUANTS.get(quant or ""), deterministic=deterministic)
    whole = mock.Mock(return_value=1)
    with mock.patch.object(gemm, "num_splits", whole), mock.patch.object(gemm_8_bits, "num_splits", whole):
        for bias in (zeros(64), None):
            packed = ops.pack_linear(zeros(64, HIDDEN), bias)
            for number in rows:
                ops.linear(packed, zeros(number, HIDDEN))


def row_format_at_load(quant: Quant | None) -> RowFormat | None:
    """Return the 8-bit row format of linears that are quantized at load; None: unquantized rows."""
    match quant:
        case Quant(kind="rows", group=group):
            return RowFormat(torch.int8, group)
        case Quant(kind="float"):
            return FP8_ROWS
        case Quant(kind="blocks"):
            return FP8_BLOCKS
    return None


def rows(quant: str | None, *, dtype: torch.dtype = BF16, hidden: int = HIDDEN, ffn: int = FFN) -> None:
    """Norms, gates, tables, and rows that are rounded in a pass of their own."""
    ops = triton_ops(CPU, dtype, QUANTS.get(quant or ""))
    for tied in (True, False):
        ops.embedding(ops.pack_embedding(zeros(64, hidden, dtype=dtype), tied), zeros(3, dtype=I64))
    x, weight = zeros(3, hidden, dtype=dtype), zeros(hidden, dtype=dtype)
    row_format = row_format_at_load(QUANTS.get(quant or ""))
    norm_rows(x, None, weight, 1e-6, row_format)
    norm_rows(x, zeros(3, hidden, dtype=dtype), weight, 1e-6, row_format)
    gate_rows(zeros(3, 2 * ffn, dtype=dtype), "silu", row_format)
    if row_format is not None:
        quantize_rows(x, row_format)
        quantize_rows(zeros(3, ffn, dtype=dtype), row_format)


def gemma_rows(hidden: int = 2560, ffn: int = 10240) -> None:
    """What of these a Gemma does otherwise: norms by float32, a scaled table, GELU, capped logits; gates of
    gpt-oss.
    """
    ops = triton_ops(CPU, BF16)
    x, weight = zeros(3, hidden), zeros(hidden, dtype=F32)
    ops.embedding(ops.pack_embedding(zeros(64, hidden), True), zeros(3, dtype=I64), 50.5)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, zeros(3, hidden), weight, 1e-6)
    ops.gate_mul(zeros(3, 2 * ffn), "gelu_tanh")
    ops.softcap(zeros(3, VOCAB), 30.0)
    ops.gate_mul(zeros(3, 2 * 2880), "swiglu_oai")
    ops.gate_mul(zeros(3, 2 * 1280), LimitedSwiGLU(7.0))
    ops.gate_mul(zeros(3, ffn), XIELU(0.8, 0.9, 0.5, -1e-6))


def portable(hidden: int = 256, ffn: int = 512) -> None:
    """All of `--exact portable`, in small shapes: only the interpreter runs these kernels."""
    x, weight, norm = zeros(3, hidden), zeros(ffn, hidden), zeros(hidden)
    for quant in ("int8", "int4"):
        ops = triton_ops(CPU, BF16, QUANTS[quant], portable=True)
        packed = ops.pack_linear(weight, zeros(ffn))
        ops.linear(packed, x)
        assert ops.linear_in_shares is not None
        ops.linear_in_shares(packed, x, 1)
        for tied in (True, False):
            ops.embedding(ops.pack_embedding(weight, tied), zeros(3, dtype=I64), 50.5)
    ops.rms_norm(x, norm, 1e-6)
    ops.add_rms_norm(x, zeros(3, hidden), norm, 1e-6)
    for activation in ("silu", "gelu_tanh", "swiglu_oai", "relu2", LimitedSwiGLU(7.0)):
        ops.gate_mul(zeros(3, 2 * ffn), activation)
    ops.softcap(zeros(3, ffn, dtype=F32), 30.0)
    cache = ops.make_kv_cache(KVShape(2, 8, 16, 2, 64, I8, BF16), CPU)
    ragged = ragged_rows([[0, 1], [2, 3]], [(20, 21), (0, 30)], 16)
    qkv, norm_nD, angles = zeros(31, 8, 64), zeros(6, 64), zeros(31, 64, dtype=F32)
    assert ops.rotate_and_write is not None
    for window, cap, sinks in ((None, None, None), (-8, None, None), (8, 30.0, zeros(4, dtype=F32))):
        plan = ops.plan_attention(ragged, cache, window)
        q = ops.rotate_and_write(qkv, norm_nD, 1e-6, angles, angles, cache, 1, plan)
        ops.attention(q, cache, 1, plan, 0.1, cap, sinks)
    ops.rotary(qkv, angles, angles)
    ops.write_kv(cache, 0, qkv[:, 4:6], qkv[:, 6:], plan)


def given_rows(hidden: int = HIDDEN, ffn: int = FFN) -> None:
    """Of a scale that a checkpoint has."""
    row_format = FP8_ROWS._replace(given=zeros(1, dtype=F32))
    x = zeros(3, hidden)
    quantize_rows(x, row_format)
    norm_rows(x, x, zeros(hidden), 1e-6, row_format)
    gate_rows(zeros(3, 2 * ffn), "silu", row_format)


def heads_apart(head_dim: int, dtype: torch.dtype = BF16) -> None:
    ops = triton_ops(CPU, dtype)
    x, angles = zeros(3, 40, head_dim, dtype=dtype), zeros(3, head_dim, dtype=F32)
    ops.rms_norm(x, zeros(40, head_dim, dtype=dtype), 1e-6)
    ops.rotary(x, angles, angles)


def sampling(dtype: torch.dtype = BF16, vocabulary: int = VOCAB) -> None:
    """With rules and without, and rows that another rank samples."""
    ops = triton_ops(CPU, BF16)
    assert ops.sample is not None
    float64 = [zeros(4, dtype=torch.float64) for _ in range(3)]
    ints, longs = zeros(4, dtype=I32), zeros(4, dtype=I64)
    facts, marks = zeros(5, 5, dtype=I64), zeros(3, 256, dtype=I32)
    floats = zeros(5, 3, dtype=F32), zeros(3, 256, dtype=F32)
    rules = PenaltyState(longs, facts, floats[0], longs, marks, floats[1], zeros(5, dtype=I32), longs, longs)
    drawn = SampleRows(float64[0], ints, float64[1], float64[2], longs, longs, ints)
    for each in (None, rules):
        ops.sample(zeros(4, vocabulary, dtype=dtype), drawn, each)
    assert ops.count_last_tokens is not None
    ops.count_last_tokens(longs, rules)


def advance() -> None:
    ops = triton_ops(CPU, BF16)
    assert ops.prepare_decode_inputs is not None
    ints, longs = zeros(4, dtype=I32), zeros(4, dtype=I64)
    state, inputs = DecodeRows(longs, ints, zeros(4, 64, dtype=I32)), DecodeInputs(ints, ints, ints)
    for drawn in (longs, None):
        ops.prepare_decode_inputs(state, drawn, inputs, 16)


def experts(quant: str | None = None, dtype: torch.dtype = BF16, *, deterministic: bool = False) -> None:
    ops = triton_ops(CPU, dtype, QUANTS.get(quant or ""))
    assert ops.pack_experts is not None
    packed = ops.pack_experts(zeros(8 * 128, 256, dtype=dtype), None)
    for count in (64, 200, 1000):
        experts_product(zeros(count, 256, dtype=dtype), packed, zeros(9, dtype=I32), fixed=deterministic)


def made_wide(quant: str, dtype: torch.dtype = BF16) -> None:
    dequantize(pack_grouped(zeros(64, HIDDEN), QUANTS[quant]), dtype)


def sums_and_norms(ranks: int, hidden: int, dtype: torch.dtype = BF16) -> None:
    addresses = zeros(ranks, dtype=I64)
    peers = Peers(1, addresses, addresses, zeros(8, dtype=I32), 1 << 18)
    x = zeros(4, hidden, dtype=dtype)
    for row_format in (None, FP8_ROWS, FP8_BLOCKS):
        sum_norm_rows(x, x, zeros(hidden, dtype=dtype), 1e-5, row_format, peers, compile_only=True)
