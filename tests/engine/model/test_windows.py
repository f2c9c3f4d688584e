"""Sliding-window layers with blocks of their own: the same tokens, and no block behind the window."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.request import Request
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.core.speculation.proposer import Proposals
from llmbox.engine.core.speculation.text_drafting import NgramProposer
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.shape import ModelShape, SlidingShape
from llmbox.engine.planning.estimator import MemoryBudget, MemoryPlan, estimate
from llmbox.engine.planning.performance_model import rank_shape
from support.device_ranks import device_ranks
from support.families import FAMILIES, make_family
from support.late_device import FakeCapture, device_engine
from support.rank_threads import load_ranks
from support.real_engines import ask, draft_at_no_price, hf_model, hf_tokens, load, run, runner_of, tokens
from support.tiny_models import make_tiny_model

GIB = 1 << 30
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 20, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 21},
    "gpt_oss": {"sliding_window": 19},
    "gemma4_text": {"sliding_window": 20, "tie_word_embeddings": False},
    "lfm3": {"sliding_window": 20},
}
LONG = ask("long", [3 + i * 7 % 300 for i in range(500)], 20, temperature=1.2, seed=8)
OTHERS = [ask(f"other {i}", range(5 + i, 25 + 30 * i), 40, temperature=0.9, seed=i) for i in range(8)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, arch = tmp_path_factory.mktemp(request.param), request.param
    options = MODELS[arch] | {"max_position_embeddings": 1024}
    if arch in FAMILIES:
        return make_family(folder, arch, **options)
    return make_tiny_model(folder, arch=arch, tokenizer=False, **options)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """By an engine that keeps all blocks."""
    engine = load(model, dtype="float32", chunked_prefill=False)
    assert engine.scheduler.kv_cache.windows is None
    found = tokens(engine, [LONG])["long"]
    assert len(set(found)) > 5
    return found


def bounded(model: Path, **options: Any) -> Engine:
    engine = load(model, dtype="float32", **{"token_budget": 64, **options})
    assert engine.scheduler.kv_cache.windows is not None
    return engine


def test_long_prompts_keep_their_window_only(model: Path, expected: list[int]) -> None:
    engine = bounded(model)
    windows, most = engine.scheduler.kv_cache.windows, 0
    engine.add(LONG)
    found: list[int] = []
    while engine.has_work:
        found += [token for output in engine.step().outputs for token in output.token_ids]
        engine.scheduler.check()
        most = max(most, windows.pool.num_used)
    assert found == expected
    assert most * 16 < 21 + 128 + 64 + 3 * 16
    assert windows.pool.num_used == 0


def test_as_transformers(model: Path) -> None:
    greedy = replace(LONG, params=replace(LONG.params, temperature=0.0))
    assert tokens(bounded(model), [greedy])["long"] == hf_tokens(hf_model(model), LONG.prompt_ids, 20)


def test_in_a_batch_and_cached(model: Path, expected: list[int]) -> None:
    engine = bounded(model)
    assert tokens(engine, [*OTHERS[:4], LONG, *OTHERS[4:]])["long"] == expected
    (first, *_) = run(engine, [replace(LONG, request_id="again")])["again"]
    assert first.cached_tokens >= 448
    turn = ask("turn", [*LONG.prompt_ids, *expected, 5, 6, 7], 8)
    alone = load(model, dtype="float32", token_budget=64, prefix_cache=False)
    assert tokens(engine, [turn]) == tokens(alone, [turn])


def test_after_preemption_and_with_forks(model: Path, expected: list[int]) -> None:
    engine = bounded(model)
    config = replace(engine.scheduler.config, context=640, watermark=0.0, premium_share=0.0)
    engine.scheduler = Scheduler(config, BlockPool(37, 16))
    fork = replace(LONG, request_id="fork", fork_of="long")
    found = tokens(engine, [*OTHERS[:2], LONG, fork, *OTHERS[2:5]])
    assert found["long"] == found["fork"] == expected
    assert engine.stats().preemptions > 0
    engine.scheduler.check()


def ways_to_cut(model: Path) -> dict[str, int]:
    """Return options for two ranks: layers that share keys and values must be in one stage."""
    sizes = parse_config(model).layer_sizes
    shares_kv = any(each.kv_source != layer for layer, each in enumerate(sizes))
    return {"tp": 2} if shares_kv else {"pp": 2}


@pytest.mark.slow
def test_ranks_give_the_tokens_of_one(model: Path, expected: list[int]) -> None:
    cut = ways_to_cut(model)
    assert tokens(bounded(model, **cut), [LONG, *OTHERS[:2]])["long"] == expected


@pytest.mark.slow
def test_ranks_that_launch_ahead_give_the_tokens_of_one(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")  # ranks are threads here
    cut = ways_to_cut(model)
    options = {"dtype": "float32", "token_budget": 64, "memory_bytes": 512 << 20}
    with device_ranks(model, graphs=True, **cut, **options) as (engine, _):
        assert engine.scheduler.kv_cache.windows is not None
        assert tokens(engine, [LONG, *OTHERS[:2]])["long"] == expected


def test_in_steps_that_are_launched_ahead(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the runner of GPUs, in a batch, cached, and as graphs."""
    if parse_config(model).recurrent is not None:  # graphs have rows that save no state, C++ kernels do not
        monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    capture = FakeCapture()
    engine = device_engine(model, dtype="float32", token_budget=64, max_running=9, capture=capture)
    while engine.prepare():
        pass
    windows = engine.scheduler.kv_cache.windows
    assert tokens(engine, [*OTHERS[:4], LONG, *OTHERS[4:]])["long"] == expected
    (first, *_) = run(engine, [replace(LONG, request_id="again")])["again"]
    assert first.cached_tokens >= 448
    assert capture.replays > 10
    assert windows.pool.num_used == 0
    engine.scheduler.check()


def test_the_plan_of_a_gpu_bounds_windows_too() -> None:
    plan, unbounded = gemma_27b("cuda"), gemma_27b("cuda", chunked_prefill=False)
    assert plan.context == unbounded.context == 131072
    assert 10 * GIB < plan.kv_bytes < 19 * GIB, "of which 7 GiB for the prompts of two steps"
    assert unbounded.kv_bytes > 60 * GIB


@pytest.fixture(scope="module")
def lfm3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"sliding_window": 20, "max_position_embeddings": 1024}
    return make_family(tmp_path_factory.mktemp("lfm3"), "lfm3", **sizes)


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_windows_beside_states_know_what_comes_before_an_edit(lfm3: Path, options: dict[str, Any]) -> None:
    """A prompt goes on where its blocks, their window and a state are known, within a chunk too."""
    engine = bounded(lfm3, token_budget=256, **options)
    assert engine.scheduler.kv_cache.states is not None
    run(engine, [LONG])
    edited = ask("edited", [*LONG.prompt_ids[:210], *range(5, 295)], 8, temperature=0.8, seed=2)
    apart = tokens(bounded(lfm3, prefix_cache=False), [edited])
    outputs = run(engine, [edited])["edited"]
    assert outputs[0].cached_tokens == 192
    assert [token for output in outputs for token in output.token_ids] == apart["edited"]
    engine.scheduler.check()


def test_a_state_is_of_no_use_without_its_window(lfm3: Path) -> None:
    engine = bounded(lfm3)
    expected = tokens(engine, [LONG])["long"]
    windows, turn = engine.scheduler.kv_cache.windows, replace(LONG, request_id="again")
    windows.pool.free(windows.pool.allocate(windows.pool.num_available))
    outputs = run(engine, [turn])["again"]
    assert outputs[0].cached_tokens == 0
    assert outputs[0].prefix_end == "evicted"
    assert [token for output in outputs for token in output.token_ids] == expected


def test_drafts_change_no_token_of_windows_beside_states(lfm3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of which the first two are right: the state goes back behind the others."""
    expected = tokens(bounded(lfm3, speculate="off"), [LONG])["long"]
    answer = [*LONG.prompt_ids, *expected]

    def propose(_self: NgramProposer, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        ends = ((len(request.token_ids), most) for request, most in wanted)
        return Proposals(
            [[*answer[end : end + 2], 3, 4][:most] for end, most in ends], matches=[16] * len(wanted)
        )

    monkeypatch.setattr(NgramProposer, "propose", propose)
    draft_at_no_price(monkeypatch)
    engine = bounded(lfm3, speculate="on")
    assert tokens(engine, [LONG])["long"] == expected
    assert tokens(engine, [replace(LONG, request_id="again")])["again"] == expected
    assert engine.stats().draft_tokens > engine.stats().accepted_tokens > 10
    engine.scheduler.check()


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_of_windows_beside_states(
    lfm3: Path, cut: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(bounded(lfm3), [LONG, *OTHERS[:2]])
    ranks = load_ranks(lfm3, monkeypatch, dtype="float32", token_budget=64, **cut)
    assert ranks.scheduler.kv_cache.windows is not None
    assert tokens(ranks, [LONG, *OTHERS[:2]]) == expected
    assert tokens(ranks, [replace(LONG, request_id="again")])["again"] == expected["long"]


def test_the_plan_counts_full_attention_windows_and_states(lfm3: Path) -> None:
    """As many bytes as the engine allocates: each kind of layer is counted once."""
    engine = bounded(lfm3)
    runner = runner_of(engine)
    shape = parse_config(lfm3).shape()
    assert shape.sliding is not None
    assert (shape.sliding.layers, shape.sliding.full_layers, shape.sliding_share) == (1, 2, 1 / 3)
    stage = rank_shape(shape, 1, 2).sliding
    assert stage is not None
    assert (stage.layers, stage.full_layers) == (1, 1)
    kv, window = runner.block_memory().sizes["kv"], runner.block_memory().sizes["window"]
    assert kv == 2 * window
    assert engine.info.kv_bytes_per_token * 16 == kv


def test_where_windows_are_not_bounded(model: Path) -> None:
    for options in ({"chunked_prefill": False}, {"context": 128}):
        engine = load(model, dtype="float32", **{"token_budget": 64, **options})
        assert engine.scheduler.kv_cache.windows is None


def gemma_27b(device: Literal["cpu", "cuda"] = "cpu", **config: Any) -> MemoryPlan:
    """62 layers, of which five in six see 1,024 tokens, in bfloat16."""
    kinds = tuple((layer + 1) % 6 != 0 for layer in range(62))
    sliding = SlidingShape(is_sliding=kinds, layers=52, full_layers=10, window=1024)
    shape = ModelShape(
        layers=62,
        hidden=5376,
        heads=32,
        kv_heads=16,
        head_dim=128,
        ffn=21504,
        vocab=262208,
        tied=True,
        context_limit=131072,
        sliding_window=1024,
        sliding_share=52 / 62,
        sliding=sliding,
    )
    budget = MemoryBudget(device=device, available=512 * GIB, cores=32, native_kernels=device == "cpu")
    settings = EngineConfig(model_path="", name="", max_running=1, **config)
    return estimate(shape, budget, settings)


def test_the_plan_of_a_gemma_of_27b_at_its_full_context() -> None:
    plan, unbounded = gemma_27b(), gemma_27b(chunked_prefill=False)
    assert plan.context == unbounded.context == 131072
    assert 10 * GIB < plan.kv_bytes < 13 * GIB
    assert unbounded.kv_bytes > 60 * GIB
    assert plan.num_blocks * plan.block_size >= plan.context


def test_windows_of_many_requests_bound_how_many_run(model: Path) -> None:
    tight = load(model, dtype="float32", token_budget=32, memory_bytes=25_500_000, context=300)
    assert tight.info.max_running < 32
    assert any("the sliding windows of each take" in note for note in tight.info.notes)
    assert len(tokens(tight, [*OTHERS])) == 8
