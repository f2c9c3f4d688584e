"""What `--disaggregate` refuses, and what the memory plan counts for it."""

from dataclasses import replace

import pytest

from llmbox.engine.config import EngineConfig, parse_disaggregate
from llmbox.engine.errors import DoesNotFit, ParallelError
from llmbox.engine.kv_store.block_file import SEGMENT_BYTES
from llmbox.engine.planning.disaggregation import prefill_config
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from support.shapes import LLAMA_3_8B

CPU = MemoryBudget(device="cpu", available=64 << 30, cores=4)
PAIR = EngineConfig(model_path="/m", name="m", disaggregate=(1, 2), context=4096)


@pytest.mark.parametrize(
    ("options", "budget", "words"),
    [
        ({"tp": 2}, CPU, "does not work with --tp 2"),
        ({"pp": 2}, CPU, "does not work with --pp 2"),
        ({"batching": "static"}, CPU, "does not work with --batching static"),
        ({"prefix_cache": False}, CPU, "does not work with --no-prefix-cache"),
        ({"chunked_prefill": False}, CPU, "does not work with --no-chunked-prefill"),
        ({"draft_path": "/d"}, CPU, "does not work with --draft"),
        ({"mtp": "on"}, CPU, "does not work with --draft"),
        ({"threads": 2}, CPU, "leave out --threads 2"),
        ({"disaggregate": (3, 2)}, CPU, "needs 5 cores, and this process may use 4 cores: ask for fewer"),
        ({}, replace(CPU, device="cuda"), "runs on CPUs only: leave it out, or use --device cpu"),
    ],
)
def test_nonsense_is_refused_with_the_reason(options, budget, words):
    with pytest.raises(ParallelError, match=words):
        estimate(LLAMA_3_8B, budget, replace(PAIR, **options))


@pytest.mark.parametrize("text", ["1", "0:1", "1:0", "a:b", "1:1:1", "-1:2", "1:2 "])
def test_what_is_no_pair_is_refused(text):
    with pytest.raises(ParallelError, match="takes P:D"):
        parse_disaggregate(text)


def test_a_pair_is_read():
    assert (parse_disaggregate("2:6"), parse_disaggregate("")) == ((2, 6), None)
    assert parse_disaggregate("auto") is None, "it begins with one engine"


def test_the_plan_counts_the_prefill_engine():
    one, pair = (estimate(LLAMA_3_8B, CPU, replace(PAIR, disaggregate=each)) for each in (None, (1, 2)))
    kv = 4096 * one.kv_bytes_per_token
    assert pair.prefill_bytes >= one.weights_bytes + kv + SEGMENT_BYTES
    assert pair.total_bytes - pair.prefill_bytes <= one.total_bytes
    assert any("tokens on 2 cores" in note for note in pair.notes)
    tight = replace(CPU, available=one.total_bytes + (1 << 30))
    with pytest.raises(DoesNotFit):
        estimate(LLAMA_3_8B, tight, replace(PAIR, memory_bytes=tight.available))


def test_the_plan_of_the_prefill_engine_is_what_was_counted():
    plan = estimate(LLAMA_3_8B, CPU, PAIR)
    theirs = estimate(LLAMA_3_8B, CPU, prefill_config(PAIR, plan, 3, (0,)))
    assert theirs.total_bytes + SEGMENT_BYTES // 2 <= plan.prefill_bytes
    assert (theirs.context, theirs.kv_dtype, theirs.quant) == (plan.context, plan.kv_dtype, plan.quant)
    assert theirs.num_blocks * theirs.block_size >= plan.context
