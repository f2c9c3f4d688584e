"""Mixtures of experts in config.json, and what follows for memory and speed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit, ModelError, ParallelError
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.model_config.shape import is_fine
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from llmbox.engine.planning.memory_model import weights_bytes
from llmbox.engine.planning.performance_model import decode_tokens_per_second, rank_shape
from llmbox.kernels.quant_formats import QUANTS
from support.tiny_models import tiny_config

GIB = 1 << 30
QWEN_3_30B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


def read(directory: Path, arch: str = "qwen3_moe", **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**tiny_config(arch), **changes}))
    return parse_config(directory)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    def layers(**changes: Any) -> tuple[bool, ...]:
        experts = read(tmp_path, num_hidden_layers=4, **changes).experts
        return () if experts is None else experts.layers

    assert layers() == (True,) * 4
    assert layers(decoder_sparse_step=2) == (False, True, False, True)
    assert layers(mlp_only_layers=[0, 2]) == (False, True, False, True)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1]) == (False, False, False, True)
    assert layers(mlp_only_layers=[0, 1, 2, 3]) == ()


def test_mixtral_counts_its_own_way(tmp_path: Path) -> None:
    experts = read(tmp_path, "mixtral").experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.inner, experts.normalized) == (4, 2, 96, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 0},
        {"num_experts": 4096},
        {"num_experts_per_tok": 9},
        {"num_experts_per_tok": None},
        {"moe_intermediate_size": None},
        {"norm_topk_prob": "yes"},
        {"decoder_sparse_step": 0},
        {"mlp_only_layers": [2]},
        {"mlp_only_layers": ["0"]},
        {"mlp_only_layers": 1},
    ],
)
def test_a_bad_value_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {next(iter(changes))}"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"shared_expert_intermediate_size": 96}, {"scoring_func": "sigmoid"}, {"n_group": 4}],
)
def test_other_routers_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="another router"):
        read(tmp_path, **changes)


def test_sizes_of_a_known_model(tmp_path: Path) -> None:
    """30.5 billion parameters, 3.3 of which a token meets: Qwen3-30B-A3B as its card has it."""
    config = read(tmp_path, **QWEN_3_30B)
    shape = config.shape()
    assert config.num_parameters == shape.params == replace(shape, exact_params=None).params == 30_532_122_624
    assert shape.active_params + shape.table_params == pytest.approx(3.35e9, rel=0.01)


def test_speed_hangs_on_the_experts_that_are_read(tmp_path: Path) -> None:
    shape = read(tmp_path, **QWEN_3_30B).shape()
    one = decode_tokens_per_second(shape, "bfloat16", "bfloat16", 100e9)
    assert one == pytest.approx(100e9 / (2 * shape.active_params))
    many = decode_tokens_per_second(shape, "bfloat16", "bfloat16", 100e9, rows=4096)
    assert many == pytest.approx(4096 * 100e9 / (2 * shape.matmul_params), rel=1e-3)
    rounded = decode_tokens_per_second(shape, "bfloat16", "bfloat16", 100e9, quant=QUANTS["int8"])
    assert 1.8 * one < rounded < 2 * one
    mixed = decode_tokens_per_second(shape, "bfloat16", "bfloat16", 100e9, quant=QUANTS["int4-mix"])
    int4 = decode_tokens_per_second(shape, "bfloat16", "bfloat16", 100e9, quant=QUANTS["int4"])
    assert rounded < mixed < int4


def test_all_experts_take_memory_and_routers_stay_wide(tmp_path: Path) -> None:
    shape = read(tmp_path, **QWEN_3_30B).shape()
    assert weights_bytes(shape, "bfloat16", None) == 2 * shape.params
    int8 = QUANTS["int8"]
    all_rounded = weights_bytes(replace(shape, experts=None), "bfloat16", int8)
    more = weights_bytes(shape, "bfloat16", int8) - all_rounded
    assert more == pytest.approx(48 * 128 * 2048 * (2 - int8.bytes_per_weight), abs=2), "routers are bfloat16"
    assert is_fine("model.layers.0.mlp.experts.17.down_proj", 48)
    assert is_fine("model.layers.0.block_sparse_moe.experts.3.w2", 32)
    assert not is_fine("model.layers.0.mlp.experts.17.up_proj", 48)


def test_ranks_have_parts_of_every_expert(tmp_path: Path) -> None:
    shape = read(tmp_path, **QWEN_3_30B).shape()
    part = rank_shape(shape, 2, 1)
    assert part.params == pytest.approx(shape.params / 2, rel=0.01)
    stage = rank_shape(shape, 1, 2)
    assert stage.experts is not None
    assert stage.experts.layers == 24
    budget = MemoryBudget(device="cpu", available=200 * GIB, cores=8)
    with pytest.raises(ParallelError, match="part of an expert has 48"):
        estimate(shape, budget, EngineConfig(model_path="", name="", tp=16, quant="int8", context=1024))


def test_ranks_have_some_experts_whole(tmp_path: Path) -> None:
    """Where no rank could have a part of each: 768 inner rows are 6 groups."""
    shape = read(tmp_path, **QWEN_3_30B).shape()
    for tp, held in ((2, 64), (16, 8), (12, 11)):
        part = rank_shape(shape, tp, 1, expert_parallel=True)
        assert part.experts is not None
        assert (part.experts.held, part.experts.inner) == (held, 768)
        assert part.experts.read(1) == pytest.approx(held * 8 / 128), "those of a row, on average"
    assert rank_shape(shape, 2, 1, expert_parallel=True).params == rank_shape(shape, 2, 1).params
    more = rank_shape(shape, 4, 1, expert_parallel=True, redundant_experts=6)
    assert more.experts is not None
    assert more.experts.held == 34, "128 + 6 on four ranks"
    assert more.experts.read(1) == rank_shape(shape, 4, 1, expert_parallel=True).experts.read(1)
    budget = MemoryBudget(device="cpu", available=200 * GIB, cores=16)
    asked = EngineConfig(model_path="", name="", tp=16, quant="int8", context=1024, expert_parallel=True)
    plan = estimate(shape, budget, asked)
    assert plan.expert_parallel
    whole = estimate(shape, budget, replace(asked, tp=1, expert_parallel=False))
    copies = 0.05  # routers, and keys and values, of which 16 ranks have 4 heads
    assert plan.weights_bytes == pytest.approx(whole.weights_bytes / 16, rel=copies)
    more = estimate(shape, budget, replace(asked, redundant_experts=16))
    assert more.weights_bytes == pytest.approx(plan.weights_bytes * 9 / 8, rel=copies), (
        "nine experts for eight"
    )
    with pytest.raises(DoesNotFit):
        estimate(shape, replace(budget, available=100 * GIB), replace(asked, redundant_experts=16 * 120))


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "w8a8", "fp8", "fp8-block"])
def test_a_gpu_takes_experts_in_every_format(tmp_path: Path, quant: Any) -> None:
    shape = read(tmp_path, **QWEN_3_30B).shape()
    budget = MemoryBudget(device="cuda", available=100 * GIB, cores=8)
    asked = EngineConfig(model_path="", name="", device="cuda", context=4096, quant=quant)
    assert estimate(shape, budget, asked).quant == quant
    small = replace(budget, available=45 * GIB)
    assert estimate(shape, small, replace(asked, quant="auto")).quant == "int8"
