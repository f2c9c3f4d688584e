"""Compiles the kernels for GPUs that are not there, with the arguments of real models; prints facts as JSON.

A program of its own, because in tests Triton's interpreter is on.
"""

import json
import sys

import torch
from torch import Tensor

from llmbox.kernels.quant import QUANTS
from llmbox.kernels.ragged import KVShape, Ragged
from llmbox.kernels.rows import DecodeInputs, DecodeRows, RuleRows, SampleRows
from llmbox.kernels.triton.attention import plan_attention
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.gemm_experts import experts_product
from llmbox.kernels.triton.linear import FP8_ROWS
from llmbox.kernels.triton.quantise import quantise_rows
from llmbox.kernels.triton.rms_norm import norm_rows
from llmbox.kernels.triton.silu_mul import gate_rows
from support.triton_compile import compiling

CPU = torch.device("cpu")
BF16, F32, I32, I64, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn
HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 151936, 32, 8, 128


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(
    dtype: torch.dtype = BF16, kv_dtype: torch.dtype = BF16, *, deterministic: bool = False
) -> None:
    """A step of two decoding rows and a prompt of 30."""
    ops = triton_ops(CPU, dtype, deterministic=deterministic)
    cache = ops.make_kv_cache(KVShape(2, 64, 16, KV_HEADS, HEAD_DIM, kv_dtype, dtype), CPU)
    ragged = Ragged(
        16,
        [1, 1, 30],
        [500, 600, 30],
        torch.tensor([0, 1, 2, 32], dtype=I32),
        torch.tensor([500, 600, 30], dtype=I32),
        zeros(3, 64, dtype=I32),
        zeros(32, dtype=I32),
        zeros(32, dtype=I32),
    )
    plan = plan_attention(ragged, cache, None, fixed=deterministic)
    qkv, norm = zeros(32, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype), zeros(40, HEAD_DIM, dtype=dtype)
    angles = zeros(32, HEAD_DIM, dtype=F32)
    q = ops.rotate_and_write(qkv, norm, 1e-6, angles, angles, cache, 1, plan)
    ops.attention(q, cache, 1, plan, 0.1)
    ops.copy_blocks(cache, [(1, 2)])


def linears(quant: str | None, rows: tuple[int, ...], *, deterministic: bool = False) -> None:
    ops = triton_ops(CPU, BF16, QUANTS.get(quant or ""), deterministic=deterministic)
    packed = ops.pack_linear(zeros(64, HIDDEN), zeros(64))
    for count in rows:
        ops.linear(packed, zeros(count, HIDDEN))


def rows(quant: str | None) -> None:
    ops = triton_ops(CPU, BF16, QUANTS.get(quant or ""))
    ops.embedding(ops.pack_embedding(zeros(64, HIDDEN), True), zeros(3, dtype=I64))
    ops.rms_norm(zeros(3, HIDDEN), zeros(HIDDEN), 1e-6)
    ops.add_rms_norm(zeros(3, HIDDEN), zeros(3, HIDDEN), zeros(HIDDEN), 1e-6)
    ops.rms_norm(zeros(3, 40, 128), zeros(40, 128), 1e-6)
    ops.silu_mul(zeros(3, 2 * FFN))
    ops.rotary(zeros(3, 40, 128), zeros(3, 128, dtype=F32), zeros(3, 128, dtype=F32))


def given_rows() -> None:
    """Of a scale that a checkpoint has."""
    row_format = FP8_ROWS._replace(given=zeros(1, dtype=F32))
    quantise_rows(zeros(3, HIDDEN), row_format)
    norm_rows(zeros(3, HIDDEN), zeros(3, HIDDEN), zeros(HIDDEN), 1e-6, row_format)
    gate_rows(zeros(3, 2 * FFN), row_format)


def sampling() -> None:
    ops = triton_ops(CPU, BF16)
    float64 = [zeros(4, dtype=torch.float64) for _ in range(3)]
    ints, longs = zeros(4, dtype=I32), zeros(4, dtype=I64)
    drawn = SampleRows(float64[0], ints, float64[1], float64[2], longs, longs, ints)
    facts, marks = zeros(5, 5, dtype=I64), zeros(3, 256, dtype=I32)
    floats = zeros(5, 3, dtype=F32), zeros(3, 256, dtype=F32)
    rules = RuleRows(longs, facts, floats[0], longs, marks, floats[1], zeros(5, dtype=I32), longs, longs)
    for each in (None, rules):
        ops.sample(zeros(4, VOCAB), drawn, each)
    parts, half = ops.parts, zeros(4, VOCAB // 2)
    parts.count(longs, rules)
    parts.candidates(half, drawn, 32, 7)
    parts.weigh(half, zeros(4, dtype=F32), drawn).columns(longs)
    parts.noise(drawn)
    ops.sample(zeros(4, 64, dtype=F32), drawn)
    state, inputs = DecodeRows(longs, ints, zeros(4, 64, dtype=I32)), DecodeInputs(ints, ints, ints)
    ops.advance(state, longs, inputs, 16)


def hopper() -> None:
    attention()
    attention(deterministic=True)
    attention(kv_dtype=FP8)
    for quant in (None, "fp8", "w8a8", "fp8-block"):
        rows(quant)
    linears("int8", (1, 100, 200, 600))
    linears("int4", (1, 20, 200))
    linears("fp8", (1, 300))
    for quant in ("w8a8", "fp8-block"):
        linears(quant, (1, 300))
        linears(quant, (3,), deterministic=True)
    given_rows()
    linears(None, (3,), deterministic=True)
    experts_product(zeros(1000, 256), zeros(8, 128, 256), zeros(9, dtype=I32))
    sampling()


def ampere() -> None:
    """No 8-bit floats there, and less shared memory."""
    attention(kv_dtype=torch.int8)
    linears("int4", (1,))
    rows("w8a8")
    linears("w8a8", (1, 300))


def main() -> None:
    for capability, work in (((9, 0), hopper), ((8, 0), ampere)):
        with compiling(capability) as kernels:
            work()
        for kernel in kernels:
            facts = {
                "capability": capability,
                "name": kernel.metadata.name,
                "shared": kernel.metadata.shared,
                "warps": kernel.metadata.num_warps,
                "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
                "cubin": len(kernel.asm["cubin"]),
            }
            sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
