"""With `--exact portable` Triton's kernels have the bits of C++, one by one and as whole models."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError
from llmbox.engine.planning.runnable import RunnablePlan, require_runnable
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.activation import Activation, LimitedSwiGLU
from llmbox.kernels.cpu.isa import usable_levels
from llmbox.kernels.dispatch import PORTABLE_CPU, load_backend
from llmbox.kernels.op_types import KVShape
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.support import KernelSite
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.portable import arithmetic
from support.lanes import nightly
from support.paged import CPU, ragged_rows
from support.real_engines import all_logits, ask, load, runner_of, tokens
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not usable_levels(), reason="compares with the C++ kernels")
DTYPES = [torch.bfloat16, torch.float32]
EXACT = {"kv_dtype": "int8", "exact": "portable"}


def both(dtype: torch.dtype, quant: str = "int8") -> tuple[Ops, Ops]:
    """Triton's operations and those of C++."""
    ours = triton_ops(CPU, dtype, QUANTS[quant], portable=True)
    return ours, load_backend(PORTABLE_CPU).ops(QUANTS[quant])


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Compare bits; results of C++ may live in memory that it uses again, and some are strided."""
    assert found.dtype == wanted.dtype
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.contiguous().view(bits), wanted.contiguous().view(bits))
    assert wanted.float().abs().max() > 0


@triton.jit
def multiply_add_kernel(out: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(out + i, arithmetic.multiply_add(tl.load(a + i), tl.load(b + i), tl.load(c + i)))


def test_a_multiply_add_is_rounded_once() -> None:
    """Also where a sum in float64 would lie half way between two float32."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 256)).astype(np.float32)
    c = (rng.standard_normal(256) * 2.0 ** rng.integers(-30, 30, 256)).astype(np.float32)
    # 1 + 2^-23 + 2^-24 - 2^-70 is below the half, and float64 rounds it to the half.
    a[0], b[0], c[0] = 2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, 1 + 2.0**-23
    assert np.float32(np.float64(a[0]) * b[0] + c[0]) == 1 + 2.0**-22
    found = torch.empty(256)
    multiply_add_kernel[(1,)](found, *map(torch.from_numpy, (a, b, c)), N=256)
    wanted = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert found[0] == 1 + 2.0**-23
    for got, exact in zip(found.numpy(), wanted, strict=True):
        near = [got, np.nextafter(got, np.float32(np.inf)), np.nextafter(got, np.float32(-np.inf))]
        assert min(near, key=lambda each: abs(Fraction(float(each)) - exact)) == got


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    ours, cpp = both(dtype)
    for width in (256, 200):
        x, weight, eps = torch.randn(37, width).to(dtype), torch.randn(width).to(dtype), 1e-6
        assert_same(ours.rms_norm(x, weight, eps), cpp.rms_norm(x, weight, eps))
        residual, copied = (torch.ones(37, width).to(dtype) for _ in "ab")
        assert_same(ours.add_rms_norm(x, residual, weight, eps), cpp.add_rms_norm(x, copied, weight, eps))
        assert_same(residual, copied)
    x, weight = torch.randn(5, 3, 34).to(dtype), torch.randn(3, 34).to(dtype)
    assert_same(ours.rms_norm(x, weight, eps), cpp.rms_norm(x, weight, eps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_numbers(dtype: torch.dtype) -> None:
    """Over numbers of all sizes, denormals too."""
    ours, cpp = both(dtype)
    named: list[Activation] = ["silu", "gelu_tanh", "swiglu_oai", "relu2", "relu2_gated"]
    numbers = torch.randn(4, 1200) * 10.0 ** torch.linspace(-40, 4, 1200)
    for activation in (*named, LimitedSwiGLU(7.0), LimitedSwiGLU(0.3)):
        x = numbers.to(dtype)
        assert_same(ours.gate_mul(x, activation), cpp.gate_mul(x.clone(), activation))
    x = torch.randn(3, 500).to(dtype)
    assert_same(ours.scale(x.clone(), 0.3), cpp.scale(x.clone(), 0.3))
    assert_same(ours.softcap(numbers, 30.0), cpp.softcap(numbers.clone(), 30.0))
    angle = torch.cat((torch.arange(999) * 0.37, torch.arange(0, 999_000, 997)))
    for found, wanted in zip(ours.cos_sin(angle), cpp.cos_sin(angle), strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant", ["int8", "int8-g32", "int4", "int4-g128"])
def test_integer_linears(dtype: torch.dtype, quant: str) -> None:
    ours, cpp = both(dtype, quant)
    for rows, inputs in ((37, 520), (3, 512)):
        weight, bias = torch.randn(200, inputs).to(dtype), torch.randn(200).to(dtype)
        x = torch.randn(rows, inputs).to(dtype)
        assert cpp.packing is not None
        assert ours.stored is not None
        rounded = cpp.packing.round(QUANTS[quant], weight)
        packed = (
            ours.stored.pack_quantized(rounded, dtype, bias),
            cpp.packing.pack_quantized(rounded, dtype, bias),
        )
        for name in ("linear", "logits"):
            assert_same(getattr(ours, name)(packed[0], x), getattr(cpp, name)(packed[1], x))
        assert ours.linear_in_shares is not None
        assert cpp.linear_in_shares is not None
        found, wanted = ours.linear_in_shares(packed[0], x, 1), cpp.linear_in_shares(packed[1], x, 1)
        assert_same(found, wanted)
        if rows == 3 and dtype == torch.float32:
            assert not torch.equal(found, ours.linear(packed[0], x)), "shares are another order"


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_rounded_at_load_and_tables(dtype: torch.dtype) -> None:
    ours, cpp = both(dtype)
    weight, x, ids = torch.randn(200, 512).to(dtype), torch.randn(3, 512).to(dtype), torch.tensor([3, 0, 199])
    found, wanted = ours.pack_linear(weight, None), cpp.pack_linear(weight.clone(), None)
    assert_same(ours.linear(found, x), cpp.linear(wanted, x))
    for tied in (True, False):
        found, wanted = ours.pack_embedding(weight, tied), cpp.pack_embedding(weight.clone(), tied)
        assert_same(ours.embedding(found, ids, 1.5), cpp.embedding(wanted, ids, 1.5))


SEQUENCES = [(9, 1), (70, 1), (0, 7), (130, 6), (0, 100)]
"""Tokens in the cache, and new ones."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({}, 16),
        ({"window": 5}, 20),
        *(
            nightly({"window": window, "softcap": cap}, b)
            for window in (5, -6)
            for cap in (None, 30.0)
            for b in (4, 16)
        ),
        nightly({"sinks_H": True}, 4),
    ],
)
def test_attention_and_what_it_reads(dtype: torch.dtype, options: dict[str, Any], block: int) -> None:
    """Norms of heads, angles, rounding to int8, and attention over prompts and single rows."""
    window, cap = options.get("window"), options.get("softcap")
    heads, kv_heads, width = 6, 2, 34
    needed = [-(-(past + new) // block) for past, new in SEQUENCES]
    tables = [list(range(sum(needed[:n]), sum(needed[: n + 1])))[::-1] for n in range(len(needed))]
    shape = KVShape(2, sum(needed), block, kv_heads, width, torch.int8, dtype)
    norm_nD = torch.randn(heads + kv_heads, width).to(dtype)
    sinks_H = torch.linspace(-3, 4, heads) if options.get("sinks_H") else None
    steps = []
    for spans in ([(0, past) for past, _ in SEQUENCES], [(past, past + new) for past, new in SEQUENCES]):
        ragged = ragged_rows(tables, spans, block)
        rows = sum(ragged.query_lens)
        steps.append((ragged, torch.randn(rows, heads + 2 * kv_heads, width), torch.randn(2, rows, width)))
    results = []
    for ops in both(dtype):
        cache = ops.make_kv_cache(shape, CPU)
        ops.clear_blocks(cache, list(range(sum(needed))))
        assert ops.rotate_and_write is not None
        for ragged, qkv, (cos, sin) in steps:
            plan = ops.plan_attention(ragged, cache, window)
            q = ops.rotate_and_write(qkv.to(dtype), norm_nD, 1e-6, cos, sin, cache, 1, plan)
        out = ops.attention(q, cache, 1, plan, 0.17, cap, sinks_H)
        results.append((q.clone(), out.clone()))
    for found, wanted in zip(*results, strict=True):
        assert_same(found, wanted)


def test_rotation_and_writes_apart_are_those_together() -> None:
    ours, _ = both(torch.bfloat16)
    tables, shape = [[1, 0]], KVShape(1, 2, 16, 2, 64, torch.int8, torch.bfloat16)
    ragged = ragged_rows(tables, [(0, 20)], 16)
    qkv, (cos, sin) = torch.randn(20, 8, 64).bfloat16(), torch.randn(2, 20, 64)
    caches = [ours.make_kv_cache(shape, CPU) for _ in "ab"]
    plan = ours.plan_attention(ragged, caches[0], None)
    assert ours.rotate_and_write is not None
    together = ours.rotate_and_write(qkv, None, 0.0, cos, sin, caches[0], 0, plan)
    apart = ours.rotary(qkv[:, :6], cos, sin)
    ours.write_kv(caches[1], 0, apart[:, 4:], qkv[:, 6:], plan)
    assert_same(together, apart[:, :4])
    slots = ragged.slots_T.long()
    for pair in zip(*(ours.block_tensors(cache) for cache in caches), strict=True):
        first, second = (each[0].transpose(1, 2).flatten(0, 1)[slots] for each in pair)
        assert torch.equal(first, second)


SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 199, "tokenizer": False}
ASKED = [ask("a", range(3, 75), 3), ask("b", [5, 9, 11], 4, temperature=0.9, seed=7)]


def answers(model: Path, **options: Any) -> tuple[dict[str, list[int]], Tensor]:
    """Tokens of prompts that are cut into pieces, and the logits of a prompt."""
    engine = load(model, **EXACT, max_running=4, token_budget=32, **options)
    found = tokens(engine, ASKED)
    return found, all_logits(runner_of(engine), [3 + 13 * i % 190 for i in range(70)]).clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype", "quant", "stored"),
    [
        ("qwen3", "bfloat16", "int8", False),
        nightly("llama", "float32", "int8-g32", False),
        nightly("gemma3_text", "bfloat16", "int8", False),
        nightly("qwen2", "bfloat16", "int4", True),
        nightly("olmo2", "bfloat16", "int4-g128", True),
    ],
)
def test_whole_models_give_the_logits_and_tokens_of_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, dtype: str, quant: str, stored: bool
) -> None:
    model = make_tiny_model(tmp_path / "model", arch=arch, **SIZES)
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    if stored:
        quantize(model, tmp_path / "out", QUANTS[quant], 1, lambda _done, _total: None)
        model, quant = tmp_path / "out", "auto"
    wanted, wanted_logits = answers(model, dtype=dtype, quant=quant)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    found, logits = answers(model, dtype=dtype, quant=quant)
    assert_same(logits, wanted_logits)
    assert found == wanted


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"quant": "int4"}, "--quant int8"),
        ({"kv_dtype": "bfloat16"}, "--kv-dtype int8"),
        ({"dtype": "float16"}, "--dtype bfloat16"),
        ({"is_plain": False}, "unset LLMBOX_KERNELS"),
        ({"ranks": 2}, "without --tp"),
    ],
)
def test_what_was_not_compared_is_refused(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    config = EngineConfig(model_path="", name="", exact="portable")
    plan = {"dtype": "bfloat16", "quant": "int8", "kv_dtype": "int8"}
    site = KernelSite(device="cpu", has_native=False)
    require_runnable(RunnablePlan(**plan), site, config)
    with pytest.raises(DeviceError, match=reason):
        require_runnable(RunnablePlan(**plan | changed), site, config)
