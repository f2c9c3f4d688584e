"""Sizes of a rank and what goes between ranks, against counts made by hand."""

from dataclasses import replace
from math import prod

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.shape import ExpertShape
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from llmbox.engine.planning.performance_model import (
    RankLink,
    decode_scaling,
    exchange_seconds,
    rank_shape,
    traffic,
)
from llmbox.kernels.quant_formats import QUANTS
from support.rank_threads import load_threads
from support.shapes import LLAMA_3_8B
from support.tiny_models import make_tiny_model, tensor_shapes


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_a_rank_is_never_estimated_below_what_it_loads(tmp_path, monkeypatch, arch, tp, pp):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    make_tiny_model(tmp_path, arch=arch, tokenizer=False, attention_bias=arch == "llama")
    read: dict[int, int] = {}
    load_threads(tmp_path, lambda rank, done, _total: read.update({rank: done}), tp=tp, pp=pp)
    config = parse_config(tmp_path)
    estimated = rank_shape(config.shape(), tp, pp).params * 4
    assert max(read.values()) <= estimated <= max(read.values()) * 1.05 + 4096
    whole = sum(4 * prod(shape) for shape in tensor_shapes_of(tmp_path).values())
    assert rank_shape(config.shape(), 1, 1).params * 4 == whole


@pytest.mark.parametrize(
    ("experts", "tp", "pp", "copies"), [(8, 2, 1, 0), (7, 2, 1, 0), (8, 2, 2, 0), (8, 2, 1, 3)]
)
def test_a_rank_with_whole_experts_is_never_estimated_below_what_it_loads(
    tmp_path, monkeypatch, experts, tp, pp, copies
):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    make_tiny_model(tmp_path, arch="qwen3_moe", tokenizer=False, num_experts=experts)
    read: dict[int, int] = {}
    load_threads(
        tmp_path,
        lambda rank, done, _total: read.update({rank: done}),
        tp=tp,
        pp=pp,
        expert_parallel=True,
        redundant_experts=copies,
    )
    shape = parse_config(tmp_path).shape()
    estimated = rank_shape(shape, tp, pp, expert_parallel=True, redundant_experts=copies).params * 4
    assert max(read.values()) <= estimated <= max(read.values()) * 1.05 + 4096


def tensor_shapes_of(directory):
    import json

    return tensor_shapes(json.loads((directory / "config.json").read_text()))


def test_kv_heads_are_shared_until_each_rank_has_one():
    whole = LLAMA_3_8B.kv_bytes_per_token("bfloat16")
    sizes = {tp: rank_shape(LLAMA_3_8B, tp, 1).kv_bytes_per_token("bfloat16") for tp in (2, 8, 16)}
    assert sizes == {2: whole // 2, 8: whole // 8, 16: whole // 8}


def test_quantized_ranks_hold_their_part_of_the_head():
    have = MemoryBudget(device="cpu", available=10**11)
    config = EngineConfig(model_path="none", name="m", quant="int8", tp=2)
    two = estimate(LLAMA_3_8B, have, config).weights_bytes
    one = estimate(LLAMA_3_8B, have, replace(config, tp=1)).weights_bytes
    assert two == pytest.approx(one / 2, rel=1e-3)


@pytest.mark.parametrize("quant", ["int8", "int4", "w8a8", "fp8-block"])
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_with_rounded_weights_hold_one_table_each(quant, pp):
    """The first one: its layers, rounded, and the input table as it is."""
    have = MemoryBudget(device="cuda", available=10**11, more_gpus=(10**11,) * 3)
    config = EngineConfig(model_path="none", name="m", quant=quant, pp=pp)
    table = LLAMA_3_8B.vocab * LLAMA_3_8B.hidden
    in_layers = LLAMA_3_8B.params - 2 * table
    stage = in_layers / pp * QUANTS[quant].bytes_per_weight + 2 * table
    assert estimate(LLAMA_3_8B, have, config).weights_bytes == pytest.approx(stage, rel=1e-3)


def test_traffic_of_a_token():
    row = 4096 * 2
    assert traffic(LLAMA_3_8B, 1, 1, "bfloat16").sums == 0
    assert traffic(LLAMA_3_8B, 2, 1, "bfloat16").sums == 65 * row
    assert traffic(LLAMA_3_8B, 8, 1, "bfloat16").sums == 65 * 2 * 7 * row // 8
    assert traffic(LLAMA_3_8B, 1, 4, "bfloat16").stages == 2 * row


@pytest.mark.parametrize("shared", [0, 512])
def test_traffic_of_experts_whose_results_are_exchanged(shared):
    """Each rank sends the results that it has to each other one. A shared expert needs its sum too."""
    experts = ExpertShape(count=64, per_token=8, inner=512, layers=30, shared=shared)
    shape, row = replace(LLAMA_3_8B, experts=experts), 4096 * 2
    sums = traffic(shape, 4, 1, "bfloat16").sums
    more = 30 * (8 - (0 if shared else 2)) * 3 * row // 4
    assert traffic(shape, 4, 1, "bfloat16", results=True).sums == sums + more
    assert (
        traffic(LLAMA_3_8B, 4, 1, "bfloat16", results=True).sums == traffic(LLAMA_3_8B, 4, 1, "bfloat16").sums
    )
    link = RankLink(1e10, 1e-5, 4.8e12)
    slower, faster = (
        exchange_seconds(shape, plan_of(4, 1, device=device, expert_parallel=True), link, rows=4)[0]
        for device in ("cpu", "cuda")
    )
    assert slower - faster == pytest.approx(4 * more / 1e10 + (30e-5 if shared else 0))


def plan_of(tp, pp, **fields):
    budget = MemoryBudget(device="cuda", available=80 << 30, cores=8)
    return replace(
        estimate(LLAMA_3_8B, budget, EngineConfig(model_path="m", name="m")), tp=tp, pp=pp, **fields
    )


def test_expected_scaling():
    def scaling(tp, pp, link):
        return decode_scaling(LLAMA_3_8B, plan_of(tp, pp), link, context=2048)

    nvlink, pcie = RankLink(450e9, 5e-6, 4.8e12), RankLink(25e9, 30e-6, 4.8e12)
    two, eight = (scaling(tp, 1, nvlink) for tp in (2, 8))
    assert 1.5 < two.factor < 2
    assert two.factor < eight.factor < 8
    of_two, of_eight = (exchange_seconds(LLAMA_3_8B, plan_of(tp, 1), nvlink, rows=1)[0] for tp in (2, 8))
    assert of_eight > of_two > 0
    assert scaling(2, 1, pcie).factor < two.factor
    stages = scaling(1, 4, nvlink)
    assert 0.9 < stages.factor < 1, "stages share memory, not time"
    assert scaling(1, 1, nvlink).factor == pytest.approx(1)
