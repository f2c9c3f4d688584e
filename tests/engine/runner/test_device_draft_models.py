"""Draft models where steps are launched ahead: their passes are, too, and no token is another one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.speculation.test_speculation import told
from engine.runner.test_draft_model import choose_five, mixed, near_model
from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.speculation.model_drafting import ModelDrafting
from llmbox.engine.errors import DeviceError
from llmbox.engine.executor import profile
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from llmbox.engine.planning.memory_model import CUDA_CONTEXT, capture_sizes, graphs_reserve
from llmbox.engine.planning.runnable import RunnablePlan, require_runnable
from llmbox.kernels.support import KernelSite
from support.fake_cuda import Card, fake_cuda
from support.families import make_family
from support.grammars import JSON, REGEX, constrained, learned
from support.lanes import first_in_the_suite
from support.late_device import FakeCapture, device_engine
from support.real_engines import ask, draft_at_no_price, drafts_of, load, run
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on

turn_on()

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_running": 3, "token_budget": 25},
    "preempted": {"kv_tokens": 200, "context": 160, "block_size": 4},
    "no cache": {"prefix_cache": False},
    "int8": {"dtype": "bfloat16", "quant": "int8", "max_running": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return near_model(tmp_path_factory.mktemp("near"))


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    draft_at_no_price(monkeypatch)
    # As many as there is room for: what pays is not what these tests are about.
    monkeypatch.setattr(ModelDrafting, "choose", choose_five)


def drafting_engine(target: Path, draft: Path, **options: Any) -> Engine:
    return learned(device_engine(target, speculate="auto", draft_path=str(draft), **options))


@pytest.mark.parametrize("drafting", ["itself", "near"])
@pytest.mark.parametrize("name", ["plain", *first_in_the_suite(["chunks", "preempted", "no cache", "int8"])])
def test_what_a_request_gets_is_the_same(model: Path, near: Path, name: str, drafting: str) -> None:
    requests, capture = mixed(), FakeCapture()
    expected = run(learned(device_engine(model, **OPTIONS[name])), requests)
    draft = model if drafting == "itself" else near
    engine = drafting_engine(model, draft, capture=capture, **OPTIONS[name])
    while engine.prepare():
        pass
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine.scheduler.check()
    stats = engine.stats()
    counts = stats.draft_methods["draft_model"]
    assert counts.draft_tokens >= counts.accepted_tokens > 0
    if drafting == "near":
        assert counts.draft_tokens > counts.accepted_tokens, "both ways were taken"
    if name == "preempted":
        assert stats.preemptions > 0
    (proposer,) = engine.executor.proposers
    assert proposer.executor.graphs._capture.replays > 0, "passes are graphs too"


def test_a_model_that_drafts_for_itself_is_always_right(model: Path) -> None:
    """Greedy, sampled, with penalties, which are counted ahead of the host, and with grammars, whose masks
    wait for it.
    """
    engine = drafting_engine(model, model, dtype="float32", max_running=2)
    ways = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.2}]
    for number, way in enumerate(ways * 2):
        run(engine, [ask(f"r{number}", range(5 + number, 30), 40, seed=number, **way)])
    for number in range(3):
        run(engine, [constrained(f"grammar{number}", REGEX, seed=number)])
    counts = engine.stats().draft_methods["draft_model"]
    assert counts.draft_tokens == counts.accepted_tokens > 90


def choose_few(_self: ModelDrafting, requests: Any, *_others: object) -> tuple[list[int], float]:
    """One to five: at times the last alone is wrong, which the device has in place of the last token."""
    return [min(most, 1 + request.num_tokens % 5) for request, most in requests], 2.0


@pytest.mark.parametrize("choose", [choose_five, choose_few])
@pytest.mark.parametrize("kernels", first_in_the_suite(["cpu", "triton"]))
@pytest.mark.filterwarnings("ignore:.*encountered in")  # numpy's, of rows that only fill up
def test_it_proposes_what_it_proposes_one_pass_after_another(
    model: Path, near: Path, kernels: str, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device forgets drafts that were rejected: as last tokens, and where penalties count them."""
    monkeypatch.setenv("LLMBOX_KERNELS", kernels)
    monkeypatch.setattr(ModelDrafting, "choose", choose)
    few: dict[str, Any] = {"allowed_token_ids": (20, 21, 22, 23)}
    requests = [
        ask("greedy", range(5, 12), 16),
        ask("drawn", range(5, 13), 16, temperature=1.0, seed=3),
        ask("ruled", [20, 21, 20], 16, temperature=1.0, seed=4, frequency_penalty=1.0, **few),
        ask("words", [20, 21, 20], 16, seed=5, bad_words=((20, 21), (22, 22, 22)), temperature=1.0, **few),
        constrained("grammar", JSON, 16, seed=6),
    ]
    options = {"dtype": "float32", "deterministic": True, "max_running": 2, "token_budget": 32, "context": 64}
    plain = learned(load(model, draft_path=str(near), overlap=False, **options))
    ahead = drafting_engine(model, near, **options)
    for engine in (plain, ahead):
        engine.scheduler.drafting._rows = 16
    expected, seen = drafts_of(plain), drafts_of(ahead)
    for request in requests:
        name = request.request_id
        assert told(run(ahead, [request])[name]) == told(run(plain, [request])[name])
    assert seen == expected
    counts = ahead.stats().draft_methods["draft_model"]
    assert counts.draft_tokens > counts.accepted_tokens > 0


def test_a_pass_is_launched_before_the_token_of_the_last_is_read(model: Path) -> None:
    engine = drafting_engine(model, model, max_running=2)
    executor = engine.executor.proposers[0].executor
    launch, collect, calls = executor.launch, executor.collect, list[str]()
    executor.launch = lambda plan: (calls.append("launch"), launch(plan))[1]
    executor.collect = lambda handle: (calls.append("read"), collect(handle))[1]
    run(engine, [ask("a", range(5, 20), 7)])
    assert calls == ["launch", *["launch", "read"] * 4, "read"]


def test_a_draft_without_a_token_proposes_none(model: Path, near: Path) -> None:
    """The pass behind it was launched: what it gives counts nowhere."""
    engine, plain = drafting_engine(model, near), device_engine(model)
    runner = engine.executor.proposers[0].executor
    logits, passes = runner._model.logits, list[int]()

    def broken(hidden: Any, *others: Any) -> Any:
        passes.append(len(hidden))
        return logits(hidden, *others) * (float("nan") if len(passes) % 3 == 2 else 1.0)

    runner._model.logits = broken
    requests = [ask("a", range(5, 30), 20), ask("b", range(6, 30), 20, temperature=1.0, seed=3)]
    expected, seen = run(plain, requests), run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])
    assert len(passes) > 6
    assert 0 < engine.stats().draft_methods["draft_model"].draft_tokens < len(passes) * 2
    engine.scheduler.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_ids_that_only_the_target_has_are_read_too(model: Path, near: Path, overlap: bool) -> None:
    """The draft model's table ends before them."""
    last = json.loads((model / "config.json").read_text())["vocab_size"] - 1
    request = ask("a", [last, 5, 6, last, 7, last], 20)
    engine = load(model, draft_path=str(near), overlap=overlap)
    engine.scheduler.drafting._rows = 16
    assert told(run(engine, [request])["a"]) == told(run(load(model, speculate="off"), [request])["a"])
    assert engine.stats().draft_methods["draft_model"].draft_tokens > 0


@pytest.mark.parametrize("arch", first_in_the_suite(["gemma3_text", "qwen3_5_text"]))
def test_other_targets(tmp_path: Path, near: Path, arch: str) -> None:
    """Windows with blocks of their own, which the draft model has not; recurrent states that go back."""
    wanted = json.loads((near / "config.json").read_text())["vocab_size"]
    make = make_family if arch == "qwen3_5_text" else make_tiny_model
    target = make(tmp_path, arch, vocab_size=wanted) if make is make_family else make(tmp_path, arch=arch)
    shutil.copy(near / "tokenizer.json", target / "tokenizer.json")
    requests = [ask(f"r{n}", range(5 + n, 40), 24, seed=n, temperature=[0.0, 1.0][n % 2]) for n in range(4)]
    expected = run(device_engine(target), requests)
    engine = drafting_engine(target, near)
    seen = run(engine, requests)
    assert {name: told(each) for name, each in seen.items()} == {n: told(o) for n, o in expected.items()}
    assert engine.stats().draft_methods["draft_model"].draft_tokens > 0
    engine.scheduler.check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_a_whole_load_and_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in for CUDA: both models are measured, both have graphs, and the host waits for nothing
    but the event of each step and of each pass.
    """
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setattr(profile, "DRAFT_MODEL_ROWS", 8)
    small = make_tiny_model(tmp_path, num_hidden_layers=1, vocab_size=99)
    sizes = {"dtype": "float32", "max_running": 1, "token_budget": 8, "context": 48, "deterministic": True}
    options = {**sizes, "device": "cuda", "memory_bytes": None, "kv_tokens": 96}
    requests = [ask("a", [20, 21, 22], 10, temperature=1.0, seed=3, logprobs=1, repetition_penalty=1.1)]
    with fake_cuda(Card(multiprocessors=2)):
        alone = load(small, speculate="off", cuda_graphs=False, **options)
        expected = run(alone, requests)
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(small, draft_path=str(small), **options)
        (proposer,) = engine.executor.proposers
        assert engine.info.kv_bytes_per_token == 2 * alone.info.kv_bytes_per_token
        assert engine.info.weights_bytes == 2 * alone.info.weights_bytes
        while engine.prepare():
            pass
        assert proposer.executor.graphs.has(1)
        passes, launch = list[int](), proposer.executor.launch
        proposer.executor.launch = lambda plan: passes.append(plan.num_tokens) or launch(plan)
        waited, events = len(cuda.queue.waits), cuda.queue.event_waits
        seen = run(engine, requests)
        assert cuda.queue.waits[waited:] == []
        assert cuda.queue.event_waits - events == engine.stats().steps + len(passes)
    assert told(seen["a"]) == told(expected["a"])
    counts = engine.stats().draft_methods["draft_model"]
    assert counts.draft_tokens == counts.accepted_tokens > 4


def test_fit_plans_it_on_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, KV cache, a pass's workspace and graphs, but no second CUDA context."""
    monkeypatch.delenv("LLMBOX_KERNELS")
    budget = MemoryBudget(device="cuda", available=40 << 30, cores=8)
    site = KernelSite(device="cuda", has_native=False, capability=(9, 0))
    target = parse_config(model)
    config = EngineConfig(model_path=str(model), name="m", draft_path=str(model), deterministic=True)
    alone = estimate(target.shape(), budget, replace(config, draft_path=None))
    both = estimate(target.shape(), budget, config)
    assert both.weights_bytes == 2 * alone.weights_bytes
    assert both.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    graphs = graphs_reserve(len(capture_sizes(both.max_running)))
    assert graphs < both.workspace_bytes - alone.workspace_bytes < graphs + CUDA_CONTEXT
    require_runnable(RunnablePlan.of(both, target), site, config)
    with pytest.raises(DeviceError, match=r"a draft model was requested, but the kernels.*--deterministic"):
        require_runnable(RunnablePlan.of(both, target), site, replace(config, deterministic=False))
