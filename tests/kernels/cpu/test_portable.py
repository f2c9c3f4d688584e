"""One answer on any machine: with integer weights and int8 KV all instruction sets give the same bits."""

import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbox.engine.config import EngineConfig
from llmbox.engine.distributed.torch_communicator import add_in_order
from llmbox.engine.errors import DeviceError
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.planning.runnable import RunnablePlan, require_runnable
from llmbox.engine.weights.adapters import AdapterLayers
from llmbox.kernels.cpu import build
from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.support import KernelSite
from support.compiled_programs import compile_program
from support.families import FAMILIES, make_family
from support.kernel_backends import backends
from support.lanes import first_in_the_suite, nightly
from support.real_engines import all_logits, ask, load, runner_of, tokens
from support.tiny_models import make_tiny_model

HERE = [name for name in backends() if name.startswith("cpu ")]
BEST, *OTHERS = HERE
LOWER = [nightly(name) if name in {"cpu avx512-vnni", "cpu avx512"} else name for name in OTHERS]
"""Those have the loops of the level above them."""
KV = {"dtype": "bfloat16", "kv_dtype": "int8"}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen3_moe": SIZES | {"moe_intermediate_size": 256},
    "gemma3_text": {"hidden_size": 200, "head_dim": 34},
    "qwen3_5_moe_text": {"max_position_embeddings": 512},
    "granitemoehybrid": {"max_position_embeddings": 512},
    "lfm2": {"max_position_embeddings": 512},
}
TRACED = Path(__file__).parent / "traced.cpp"
TRACED_FLAGS = ("-std=c++20", "-O0", "-pthread", "-ffp-contract=off", "-w", "-Wno-psabi")
LANES = (16, 8, 4)
"""Floats of a vector with `traced.h`: of AVX-512, of AVX2, of Arm and the portable kernels."""
FEW, ALL = 0, 256
"""Numbers of rows and cuts of prompts: some at which tiles and blocks change, or all up to 256."""
PARTS = {4: 2, 8: 4, 16: 8}
"""Tests that share all of them, by lanes: each takes some minutes."""


def requests() -> list[AddRequest]:
    """Prompts of 1 to 150 tokens, some with a common beginning; greedy and drawn by turns."""
    common = [3 + 7 * n % 300 for n in range(70)]
    made = []
    for n in range(8):
        own = [3 + (n * n + 11 * i) % 300 for i in range(1 + 11 * n)]
        drawn = {"temperature": 0.8, "seed": n, "top_p": 0.9} if n % 2 else {}
        made.append(ask(f"r{n}", common + own if n % 3 == 0 else own, 8, **drawn))
    return made


def answers(model: Path, **options: Any) -> tuple[dict[str, list[int]], Tensor]:
    """Tokens of `requests`, chunked and side by side, and the logits of a prompt."""
    engine = load(model, **KV, max_running=5, token_budget=48, **options)
    found = tokens(engine, requests())
    return found, all_logits(runner_of(engine), [3 + 13 * i % 300 for i in range(150)])


@cache
def of_the_best(model: Path, quant: str) -> tuple[dict[str, list[int]], Tensor]:
    return answers(model, quant=quant)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")

    def make(arch: str) -> Path:
        if arch in FAMILIES:
            return make_family(folder / arch, arch, **MODELS[arch])
        return make_tiny_model(folder / arch, arch=arch, tokenizer=False, **MODELS[arch])

    return cache(make)


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize(
    ("arch", "quant"),
    [
        ("qwen3", "int8"),
        ("qwen3_moe", "int4"),
        ("qwen3_5_moe_text", "int8-g32"),
        *(nightly(arch, quant) for arch in MODELS for quant in ("int8", "int8-g32", "int4", "int4-g128")),
    ],
)
def test_tokens_and_logits_are_those_of_the_best_instruction_set(
    models: Any, monkeypatch: pytest.MonkeyPatch, level: str, arch: str, quant: str
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", BEST)
    wanted, wanted_logits = of_the_best(models(arch), quant)
    monkeypatch.setenv("LLMBOX_KERNELS", level)
    found, logits = answers(models(arch), quant=quant)
    assert found == wanted
    assert torch.equal(logits.view(torch.int32), wanted_logits.view(torch.int32))


@pytest.mark.parametrize("level", LOWER)
def test_bfloat16_is_rounded_alike(level: str) -> None:
    """Numbers of every exponent, with the halves between two results and what is next to those."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x18001, 0x7FFFFF])
    positive = (torch.arange(255).view(-1, 1) << 23 | low).view(-1).to(torch.int32).view(torch.float32)
    by = torch.cat((positive, -positive))
    ones = torch.ones(1, len(by), dtype=torch.bfloat16)
    rounded = []
    for name in (BEST, level):
        recurrent = load_backend(name).ops().recurrent
        assert recurrent is not None
        rounded.append(recurrent.mul_add(ones, by, None).view(torch.int16).clone())
    assert torch.equal(*rounded)


@pytest.mark.parametrize("name", HERE)
def test_angles_are_near_and_alike(name: str) -> None:
    angle = torch.cat((torch.arange(5000) * 0.37, torch.arange(0, 1_000_000, 37), torch.tensor([0.0, 1e-20])))
    cos, sin = load_backend(name).ops().cos_sin(angle)
    torch.testing.assert_close(cos.double(), angle.double().cos(), atol=6e-8, rtol=0)
    torch.testing.assert_close(sin.double(), angle.double().sin(), atol=6e-8, rtol=0)
    wanted = load_backend(BEST).ops().cos_sin(angle)
    assert torch.equal(cos, wanted[0])
    assert torch.equal(sin, wanted[1])


@pytest.mark.parametrize("name", [BEST, *LOWER])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_sums_in_shares_are_those_of_any_number_of_ranks(name: str, rows: int) -> None:
    ops, quant = load_backend(name).ops(QUANTS["int8"]), QUANTS["int8"]
    packing = ops.packing
    assert packing is not None
    assert ops.linear_in_shares is not None
    weight, bias = torch.randn(100, 1024, dtype=torch.bfloat16), torch.randn(100)
    x = torch.randn(rows, 1024, dtype=torch.bfloat16)
    rounded = packing.round(quant, weight)

    def shares(ranks: int) -> list[Tensor]:
        found = []
        for rank, (codes, scales) in enumerate(
            zip(rounded.codes_OI.chunk(ranks, 1), rounded.scales_OG.chunk(ranks, 1), strict=True)
        ):
            part = replace(rounded, codes_OI=codes.contiguous(), scales_OG=scales.contiguous())
            packed = packing.pack_quantized(part, torch.bfloat16, bias if rank == 0 else None)
            inputs = x[:, rank * 1024 // ranks : (rank + 1) * 1024 // ranks]
            found.append(ops.linear_in_shares(packed, inputs, ranks).clone())
        return found

    (wanted,) = shares(1)
    for ranks in (2, 4):
        total = torch.empty_like(wanted)
        add_in_order(shares(ranks), total)
        assert torch.equal(total, wanted)
    exact = (
        x.float() @ (rounded.codes_OI.float() * rounded.scales_OG.float().repeat_interleave(128, 1)).T + bias
    )
    assert (wanted.float() - exact).abs().max() < 0.02 * exact.abs().max()


def test_adapters_add_to_sums_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = AdapterLayers(load_backend(BEST).ops(QUANTS["int8"]))
    packed = layers.ops.pack_linear(torch.randn(64, 256, dtype=torch.bfloat16), None)
    rows, added = object(), []
    monkeypatch.setattr(layers, "rows", rows)
    monkeypatch.setattr(layers, "_add", lambda *given: added.append(given))
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    assert layers.ops.linear_in_shares is not None
    out = layers.ops.linear_in_shares(packed, x, 1)
    assert added == [(packed, x, out, rows)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "quant", "cut"),
    [
        ("qwen3", "int8", {"tp": 2}),
        *(
            nightly(arch, quant, cut)
            for arch, quant in (("qwen3", "int8"), ("qwen3", "int4"), ("granitemoehybrid", "int8"))
            for cut in ({"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2})
            if arch == "qwen3" or "tp" not in cut
        ),
    ],
)
def test_ranks_and_stages_give_the_tokens_of_one(
    models: Any, arch: str, quant: str, cut: dict[str, int]
) -> None:
    options = {**KV, "quant": quant, "exact": "portable", "max_running": 5, "token_budget": 48}
    wanted = tokens(load(models(arch), **options), requests())
    assert tokens(load(models(arch), **options, **cut), requests()) == wanted


@pytest.mark.parametrize(
    ("arch", "options", "reason"),
    [
        ("qwen3", {"quant": "none"}, "--quant int8"),
        ("qwen3", {"kv_dtype": "auto"}, "--kv-dtype int8"),
        ("qwen3_moe", {"tp": 2}, "without --tp"),
    ],
)
def test_a_model_whose_bits_may_differ_is_refused(
    models: Any, arch: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DeviceError, match=reason):
        load(models(arch), **{**KV, "quant": "int8", "exact": "portable", **options})


def test_a_gpu_is_refused() -> None:
    config = EngineConfig(model_path="", name="", exact="portable")
    site = KernelSite(device="cuda", has_native=True, capability=(9, 0))
    with pytest.raises(DeviceError, match="--device cpu"):
        require_runnable(RunnablePlan("bfloat16", "int8", "int8"), site, config)


def run_traced(
    lanes: int, rows: int, part: tuple[int, int] = (0, 1), sources: Path = build.SOURCES
) -> tuple[int, list[str]]:
    """Compile and run the driver: its exit status and its lines. `part` of the numbers up to `rows`: which of
    how many.
    """
    program = compile_program(TRACED, (*TRACED_FLAGS, f"-DLLMBOX_TRACED={lanes}"), sources)
    done = subprocess.run([program, *map(str, (rows, *part))], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@cache
def digests(lanes: int, rows: int, part: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the digests of all cases with so many lanes, none of which may find two trees."""
    code, lines = run_traced(lanes, rows, part)
    assert (code, lines[-1]) == (0, "one tree each")
    return lines[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", first_in_the_suite(LANES))
def test_sums_are_one_tree_in_any_company(lanes: int) -> None:
    """Linears, norms, activations, attention, scans; numbers of rows, tiles, threads, pieces of prompts."""
    assert len(digests(lanes, FEW)) > 35


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes", "part"), [(lanes, (n, parts)) for lanes, parts in PARTS.items() for n in range(parts)]
)
def test_sums_are_one_tree_among_up_to_256_rows(lanes: int, part: tuple[int, int]) -> None:
    assert digests(lanes, ALL, part) == digests(LANES[0], FEW)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "kept", "broken"),
    [
        # Chunks that begin where a window does, and sums over as many numbers as there are lanes.
        ("attention/attention.h", "strip_of(step, seen) / STRIPS * STRIPS", "strip_of(step, seen)"),
        ("vector/simd.h", "constexpr int SUM_LANES = 16", "constexpr int SUM_LANES = LANES"),
    ],
)
def test_another_order_is_found(tmp_path: Path, file: str, kept: str, broken: str) -> None:
    sources = tmp_path / "native"
    shutil.copytree(build.SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(kept) == 1
    (sources / file).write_text(text.replace(kept, broken))
    code, lines = run_traced(8, FEW, sources=sources)
    assert code == 1 or lines[:-1] != digests(LANES[0], FEW)
