"""Recurrent state of hybrids on the runner for devices: the tokens of the one that works while called."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import estimate
from llmbox.engine.planning.memory_plan import MemoryBudget
from llmbox.engine.planning.runnable import RunnablePlan, require_runnable
from llmbox.kernels.support import KernelSite
from support.device_ranks import device_ranks
from support.families import make_family
from support.lanes import nightly
from support.late_device import FakeCapture, device_engine
from support.no_questions import NoQuestions
from support.real_engines import ask, load, run, tokens

OPTIONS = {"dtype": "float32", "max_running": 4, "token_budget": 16}
PROMPT = [3 + i * 7 % 300 for i in range(70)]
REQUESTS = [
    ask("long", PROMPT, 36, temperature=0.8, seed=4),
    *(replace(ask(f"fork {i}", PROMPT, 6, temperature=0.8, seed=i), fork_of="long") for i in range(2)),
    ask("short", [5, 9, 11], 6, temperature=0.9, seed=3),
    ask("one", [7], 9),
    *(ask(f"growing {i}", range(20 + i, 32), 36, temperature=0.8, seed=i) for i in range(3)),
]


@pytest.fixture(
    scope="module", params=["qwen3_5_text", nightly("lfm2"), nightly("kimi_linear"), nightly("falcon_h1")]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp(request.param), request.param, max_position_embeddings=512)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    return tokens(load(model, **OPTIONS, prefix_cache=False), REQUESTS)


@pytest.fixture
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")


@pytest.mark.usefixtures("_plain_kernels")
def test_graphs_with_rows_that_only_fill_up(model: Path, expected: dict[str, list[int]]) -> None:
    """Three rows in a graph of four; answers are long enough to save states from graphs."""
    capture = FakeCapture()
    engine = device_engine(model, capture=capture, **OPTIONS)
    while engine.prepare():
        pass
    runner, questions = engine.executor, NoQuestions()
    runner._forward = questions.but_for(runner._forward)
    runner._model.hidden = questions.but_for(runner._model.hidden)  # the reference looks at its inputs
    runner.launch_sized = questions.during(runner.launch_sized)
    assert tokens(engine, REQUESTS) == expected
    assert capture.replays > 10
    turn = ask("turn", [*PROMPT, *expected["long"], 9, 8], 5)
    found = run(engine, [turn])["turn"]
    assert found[0].cached_tokens >= 96, "the state that a graph saved of the answer"
    told = [token for output in found for token in output.token_ids]
    assert told == tokens(load(model, **OPTIONS, prefix_cache=False), [turn])["turn"]
    engine.scheduler.check()


def test_preempted_requests_and_few_slots(model: Path, expected: dict[str, list[int]]) -> None:
    engine = device_engine(model, **OPTIONS)
    config = replace(engine.scheduler.config, context=112, watermark=0.0, premium_share=0.0, state_slots=5)
    engine.scheduler = Scheduler(config, BlockPool(8, 16))
    assert tokens(engine, REQUESTS) == expected
    assert engine.stats().preemptions > 0
    engine.scheduler.check()


def test_a_plan_for_a_gpu_has_slots_and_may_run(model: Path) -> None:
    config = EngineConfig(model_path=str(model), name="tiny")
    budget = MemoryBudget(device="cuda", available=8 << 30, cores=2)
    read = parse_config(model)
    plan = estimate(read.shape(), budget, config)
    assert plan.state_slots >= plan.max_running + 24
    assert plan.total_bytes <= plan.budget_bytes
    require_runnable(RunnablePlan.of(plan, read), KernelSite(device="cuda", capability=(9, 0)), config)


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks(model: Path, expected: dict[str, list[int]], cut: dict[str, int]) -> None:
    with device_ranks(model, graphs=True, **cut, **OPTIONS) as (engine, ranks):
        while engine.prepare():
            pass
        assert tokens(engine, REQUESTS) == expected
        assert tokens(engine, REQUESTS) == expected, "from the states that were kept"
        assert engine.stats().prefix_hits > 0
        engine.scheduler.check()
    assert ranks[0].capture is not None
    assert ranks[0].capture.replays > 0
