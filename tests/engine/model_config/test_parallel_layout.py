"""Who holds what: every row once, or on purpose more often, and clear words where it does not come out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.engine.errors import ParallelError
from llmbox.engine.model_config.parallel_layout import MAX_RANKS, ParallelLayout, can_split, check_layout
from llmbox.engine.model_config.shape import ModelShape
from llmbox.kernels.quant_formats import QUANTS

SHAPE = ModelShape(
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=12288,
    vocab=151936,
    tied=False,
    context_limit=40960,
)


@given(st.integers(1, 100), st.integers(1, 16))
def test_stages_hold_every_layer_once_and_differ_by_one_at_most(layers, pp):
    pp = min(pp, layers)
    runs = [ParallelLayout(1, pp, rank).layers(layers) for rank in range(pp)]
    assert [layer for run in runs for layer in run] == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(st.integers(1, 5000), st.integers(1, 16))
def test_parts_of_the_vocabulary_cover_it_and_have_one_size(vocab, tp):
    if not can_split(replace(SHAPE, vocab=vocab, heads=tp, kv_heads=tp, ffn=tp), tp, 1, None):
        return
    parts = [ParallelLayout(tp, 1, rank).vocabulary(vocab) for rank in range(tp)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(vocab))
    assert len({part.size for part in parts}) == 1
    assert all(part.start < part.stop for part in parts)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 5))
def test_each_query_head_stands_beside_its_kv_head(log_kv, log_group, log_tp):
    kv_heads, tp = 2**log_kv, 2**log_tp
    heads = kv_heads * 2**log_group
    if heads % tp:
        return
    for rank in range(tp):
        layout = ParallelLayout(tp, 1, rank)
        mine, kv = layout.equal(heads), layout.kv_heads(kv_heads)
        for local, head in enumerate(range(mine.start, mine.stop)):
            wanted = head // (heads // kv_heads)
            assert kv.start + local // (mine.size // kv.size) == wanted


def test_ranks_count_through_the_stages():
    layout = ParallelLayout(2, 3, 3)
    assert (layout.stage, layout.tp_rank, layout.stage_ranks, layout.answers) == (1, 1, [2, 3], 4)
    assert layout.shard == "2 of 2, stage 2 of 3"
    assert ParallelLayout().shard == ""
    assert len({ParallelLayout(2, 2, rank).shard for rank in range(4)} | {ParallelLayout(4, 1, 0).shard}) == 5


@given(st.integers(1, 16), st.integers(0, 300))
def test_every_expert_is_whole_on_one_rank_of_each_stage(tp, more):
    count = tp + more
    parts = [ParallelLayout(tp, 2, rank, expert_parallel=True).experts(count) for rank in range(2 * tp)]
    assert [expert for part in parts[:tp] for expert in part] == list(range(count))
    assert parts[:tp] == parts[tp:]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_packed_weights_of_whole_experts_are_others():
    shards = {ParallelLayout(2, 1, rank, expert_parallel=whole).shard for rank in (0, 1) for whole in (0, 1)}
    assert len(shards) == 4


@pytest.mark.parametrize(
    ("changes", "tp", "pp", "words"),
    [
        ({}, 3, 1, "32 attention heads cannot be shared equally; this model can take 1, 2, 4, 8 or 16"),
        ({"heads": 48, "kv_heads": 8}, 12, 1, "8 KV heads can neither be shared nor copied"),
        ({"ffn": 1001}, 2, 1, "1001 inner rows"),
        ({"vocab": 5}, 4, 1, "only 5 tokens"),
        ({"layers": 4}, 1, 5, "4 layers"),
        ({}, 16, 2, f"32 ranks: at most {MAX_RANKS}"),
    ],
)
def test_what_cannot_be_cut_is_told_with_what_can(changes, tp, pp, words):
    with pytest.raises(ParallelError, match=words):
        check_layout(replace(SHAPE, **changes), tp, pp, None)


def test_groups_of_quantized_weights_are_not_cut():
    check_layout(SHAPE, 16, 1, QUANTS["int8"])
    shape = replace(SHAPE, ffn=12288 + 64 * 4)
    check_layout(shape, 2, 1, None)
    with pytest.raises(
        ParallelError, match=r"groups of 128 inputs, and a part of the MLP has 3136: take another"
    ):
        check_layout(shape, 4, 1, QUANTS["int8"])
    for name in ("w8a8", "fp8-block"):
        with pytest.raises(ParallelError, match="groups of 128 inputs"):
            check_layout(shape, 4, 1, QUANTS[name])
    check_layout(shape, 4, 1, QUANTS["int8-g32"])
    check_layout(shape, 4, 1, QUANTS["fp8"])


def test_blocks_are_not_rounded_over_keys_and_values():
    """Where a rank's part of the keys is less than one: those of a checkpoint have their scales already."""
    quant, narrow = QUANTS["fp8-block"], replace(SHAPE, heads=64, head_dim=64)
    for tp in (1, 2, 4):
        check_layout(narrow, tp, 1, quant)
    with pytest.raises(
        ParallelError, match=r"fp8-block.* 128 outputs, and a part of the keys has 64: .*1, 2 or 4"
    ):
        check_layout(narrow, 8, 1, quant)
    check_layout(narrow, 8, 1, QUANTS["fp8"])
    check_layout(replace(narrow, quant="fp8-block"), 8, 1, quant)
    check_layout(SHAPE, 16, 1, quant)  # whole heads, copied
