"""What the trial steps compile at load is all that serving asks for later."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.warmup import num_warmup_blocks, run_warmup, warmup_steps
from llmbox.engine.planning.estimator import MemoryPlan
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.linear.tile_config import ROW_COUNTS
from support.fp8_checkpoint import round_by_output
from support.late_device import device_engine
from support.paged import CPU, PagedStep
from support.real_engines import ask, run
from support.tiny_models import make_tiny_model
from support.triton_variants import noted_variants

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
}
LAYERS = {
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
OPTIONS = {"dtype": "float16", "max_running": 70, "token_budget": 1500, "context": 2000, "kv_tokens": 40000}


def plan_of(engine: Engine) -> MemoryPlan:
    info = engine.info
    return MemoryPlan(
        device="cuda", dtype="float16", kv_dtype="float16", quant="none", weights_bytes=1, workspace_bytes=1,
        kv_bytes_per_token=1, block_size=info.block_size, num_blocks=info.num_blocks, budget_bytes=1,
        context=info.context_window, max_running=info.max_running, token_budget=1500,
    )  # fmt: skip


def serve(engine: Engine) -> None:
    """Prompts and batches of many sizes, some in chunks, with everything a request can ask of the kernels."""
    draw = random.Random(4)
    for batch in (1, 3, 20, 40, 70):
        longest = 1900 if batch < 4 else 150
        requests = [
            ask(
                f"{batch}-{number}",
                [5] * draw.randint(1, longest),
                draw.randint(2, 6),
                temperature=draw.choice([0.0, 1.0]),
                top_k=draw.choice([0, 5]),
                repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
                logprobs=draw.choice([None, 2]),
                prompt_logprobs=draw.choice([None, None, 1]),
            )
            for number in range(batch)
        ]
        run(engine, requests)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quant": "int4"},
        {"quant": "w8a8"},
        {"quant": "fp8-block"},
        {"quant": "auto"},
        {"kv_dtype": "int8", "deterministic": True},
        {"arch": "qwen3_5_text"},
        {"arch": "qwen3_moe", "quant": "int4"},
        {"arch": "qwen3_moe", "quant": "fp8-block", "deterministic": True},
    ],
)
def test_serving_compiles_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    arch, options = str(options.get("arch", "qwen3")), {k: v for k, v in options.items() if k != "arch"}
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, **SIZES | LAYERS.get(arch, {}))
    if options.get("quant") == "auto":  # of a checkpoint
        round_by_output(model, {"quant_method": "fp8", "activation_scheme": "static"}, given={})
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    engine = device_engine(model, **OPTIONS, **options)
    plan = plan_of(engine)
    assert num_warmup_blocks(plan) <= plan.num_blocks
    with noted_variants() as compiled:
        run_warmup(engine.executor, plan, engine.executor._ops.warmup_batch_sizes)
    with noted_variants() as needed:
        serve(engine)
    assert len(needed) > 10
    assert {variant[0] for variant in needed} - {variant[0] for variant in compiled} == set()
    assert needed <= compiled


def test_no_step_has_more_requests_than_may_run() -> None:
    """Few requests of a short context are fewer tokens than a step may have."""
    plan: Any = SimpleNamespace(max_running=4, step_tokens=8192, context=32, block_size=16)
    steps = list(warmup_steps(plan, ROW_COUNTS))
    assert max(len(step.rows) for step in steps) == 4
    assert max(step.num_tokens for step in steps) == 4 * 31


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_no_layer_compiles_anything_of_its_own(kv_dtype: torch.dtype) -> None:
    step = PagedStep([(40, 1), (0, 9)], heads=(4, 2), head_dim=64, dtype=torch.float16, kv_dtype=kv_dtype)
    ops = triton_ops(CPU, torch.float16)
    cache = ops.make_kv_cache(replace(step.shape(), num_layers=4), CPU)
    plan = ops.plan_attention(step.ragged([(40, 41), (0, 9)]), cache, None)
    q, k = torch.zeros(10, 4, 64).half(), torch.zeros(10, 2, 64).half()
    of_layers = []
    for layer in range(4):
        with noted_variants() as compiled:
            ops.write_kv(cache, layer, k, k, plan)
            ops.attention(q, cache, layer, plan, 0.1)
        of_layers.append(compiled)
    assert len(of_layers[0]) >= 3
    assert all(variants == of_layers[0] for variants in of_layers)
