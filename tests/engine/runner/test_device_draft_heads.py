"""Draft heads where steps are launched ahead: their passes are, too, and no token is another one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.runner.test_draft_head import KINDS, OPTIONS, Pair, counts, mixed, pairs, told
from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.speculation.model_drafting import ModelDrafting
from llmbox.engine.errors import DeviceError
from llmbox.engine.executor import profile
from llmbox.engine.kv_store.usage import cache_variables
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from llmbox.engine.planning.memory_model import CUDA_CONTEXT, capture_sizes, graphs_reserve
from llmbox.engine.planning.runnable import RunnablePlan, require_runnable
from llmbox.kernels.support import KernelSite
from support.adapters import plain_tensors, write_adapter
from support.draft_heads import add_mtp, ask_always, make_eagle3, make_medusa, make_predictable, make_target
from support.fake_cuda import Card, fake_cuda
from support.families import make_family
from support.grammars import JSON, constrained, learned
from support.lanes import nightly
from support.late_device import FakeCapture, device_engine
from support.real_engines import ask, drafts_of, load, run
from support.triton_interpreter import turn_on

turn_on()

__all__ = ["pairs"]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    ask_always(monkeypatch, 4)


def on_device(pair: Pair, **options: Any) -> Engine:
    draft = {} if pair.head is None else {"draft_path": str(pair.head)}
    engine = learned(device_engine(pair.model, speculate="auto", **draft, **options))
    engine.scheduler.drafting._rows = 24
    return engine


CASES = [
    ("mtp", "preempted", True),
    ("mtp of latents", "plain", False),
    ("eagle3", "chunks", True),
    ("medusa", "plain", False),
]
OTHERS = {(kind, name, graphs) for kind in KINDS for name in OPTIONS for graphs in (True, False)} - {*CASES}


@pytest.mark.parametrize(("kind", "name", "graphs"), [*CASES, *(nightly(*each) for each in sorted(OTHERS))])
def test_what_a_request_gets_is_the_same(pairs: dict[str, Pair], kind: str, name: str, graphs: bool) -> None:
    requests, pair = mixed(), pairs[kind]
    expected = run(learned(device_engine(pair.model, **OPTIONS[name])), requests)
    engine = on_device(pair, capture=FakeCapture() if graphs else None, **OPTIONS[name])
    while engine.prepare():
        pass
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine.scheduler.check()
    drafted, accepted = counts(engine)
    assert accepted > 0
    if name == "preempted":
        assert engine.stats().preemptions > 0
    else:
        assert drafted > accepted, "both ways were taken"
    own = engine.executor.proposers[0].executor.graphs
    assert (own is not None and own._capture.replays > 0) is (graphs and kind != "medusa"), (
        "passes are graphs"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_it_proposes_what_it_proposes_one_step_after_another(pairs: dict[str, Pair], kind: str) -> None:
    """Greedy, sampled and with penalties; after a prompt in chunks, and after one that is cached."""
    requests = [
        ask("greedy", range(5, 45), 16),
        ask("drawn", range(5, 33), 16, temperature=1.0, seed=3),
        ask("ruled", range(5, 33), 16, temperature=1.0, seed=4, frequency_penalty=1.0),
        constrained("grammar", JSON, 16, prompt=range(5, 33), seed=5),
    ]
    options = {"dtype": "float32", "max_running": 2, "token_budget": 16, "context": 64, "block_size": 4}
    plain, ahead = pairs[kind].load(**options), on_device(pairs[kind], capture=FakeCapture(), **options)
    while ahead.prepare():
        pass
    expected, seen = drafts_of(plain), drafts_of(ahead)
    for request in requests:
        name = request.request_id
        tokens, same = (told(run(engine, [request])[name])[0] for engine in (ahead, plain))
        assert tokens == same
    assert seen == expected
    assert counts(ahead) == counts(plain)
    assert counts(ahead)[1] > 0


def test_all_passes_are_launched_before_the_last_drafts_are_read(pairs: dict[str, Pair]) -> None:
    engine = on_device(pairs["mtp of latents"], dtype="float32", max_running=2)
    executor = engine.executor.proposers[0].executor
    launch, collect, calls = executor.launch, executor.collect, list[str]()
    executor.launch = lambda plan: (calls.append("launch"), launch(plan))[1]
    executor.collect = lambda handle: (calls.append("read"), collect(handle))[1]
    run(engine, [ask("a", range(5, 20), 6)])
    follows = ["launch"]  # of the prompt; nobody reads what it gives
    assert calls[:9] == [*follows, "launch", *["launch", "read"] * 3, "read"]


def test_rows_of_answers_are_computed_together(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts steps are launched ahead, and the head runs once a block."""
    ask_always(monkeypatch, 0)
    monkeypatch.setattr(ModelDrafting, "explore", lambda _self, _requests: None)
    engine = on_device(pairs["mtp"], max_running=1)
    executor, passes = engine.executor.proposers[0].executor, list[int]()
    launch = executor.launch
    executor.launch = lambda plan: passes.append(plan.num_tokens) or launch(plan)
    run(engine, [ask("a", range(5, 21), 49)])
    assert passes == [16, 16, 16, 16]


def test_requests_with_adapters_get_the_same(pairs: dict[str, Pair], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", plain_tensors(), lora_alpha=80)
    requests = [
        replace(each, adapter=str(folder)) if number % 2 else each for number, each in enumerate(mixed()[:4])
    ]
    options = {"token_budget": 64, "lora_bytes": 1 << 20}
    expected = run(device_engine(pairs["eagle3"].model, **options), requests)
    engine = on_device(pairs["eagle3"], **options)
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])


def test_blocks_on_disk_have_the_heads_keys(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cache_variables(tmp_path / "kv", 1 << 30, 1.0).items():
        monkeypatch.setenv(name, value)
    seen = []
    pair = pairs["eagle3"]
    for draft in (pair.head, pair.head, None):
        options = {} if draft is None else {"draft_path": str(draft)}
        engine = load(pair.model, dtype="float32", overlap=True, **options)
        engine.scheduler.drafting._rows = 24
        engine.scheduler.drafting.remember = lambda _request: None
        outputs = run(engine, [ask("a", range(5, 65), 24)])["a"]
        seen.append((told(outputs), outputs[0].disk_tokens, engine.stats().accepted_tokens))
        engine.close()
    first, second, without = seen
    assert first[:2] == (second[0], 0)
    assert second[1:] == (48, first[2])
    assert first[2] > 0
    assert not without[1], "blocks without a head are others"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")  # numpy's, of rows that only fill up
@pytest.mark.parametrize("kind", ["mtp", "eagle3", "medusa"])
def test_a_whole_load_and_its_steps(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in for CUDA: the head is measured with its target and has graphs, and the host waits for
    nothing but the event of each step and of each pass of a draft. Layers are few, since Triton's kernels are
    interpreted.
    """
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setattr(profile, "DRAFT_MODEL_ROWS", 8)
    if kind == "mtp":
        few = {"num_hidden_layers": 1, "first_k_dense_replace": 2, "vocab_size": 98}
        model = make_predictable(make_family(tmp_path / "model", "glm4_moe", **few))
        small, options = add_mtp(model, "deepseek"), dict[str, Any]()
    else:
        layers = 4 if kind == "eagle3" else 1
        small = make_target(tmp_path / "model", vocab_size=98, num_hidden_layers=layers)
        head = tmp_path / "head"
        make_eagle3(head, small, vocab_size=98) if kind == "eagle3" else make_medusa(head, small)
        options = {"draft_path": str(head)}
    sizes = {"dtype": "float32", "max_running": 1, "token_budget": 8, "context": 48, "deterministic": True}
    sizes |= {"device": "cuda", "memory_bytes": None, "kv_tokens": 96}
    requests = [ask("a", [20, 21, 22], 8, temperature=1.0, seed=3, logprobs=1, repetition_penalty=1.1)]
    with fake_cuda(Card(multiprocessors=2)):
        alone = load(small, speculate="off", cuda_graphs=False, **sizes)
        expected = run(alone, requests)
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(small, **sizes, **options)
        (proposer,) = engine.executor.proposers
        assert (engine.info.kv_bytes_per_token > alone.info.kv_bytes_per_token) is (kind != "medusa")
        assert engine.info.weights_bytes > alone.info.weights_bytes
        while engine.prepare():
            pass
        assert kind == "medusa" or proposer.executor.graphs.has(1)
        passes, collect = list[int](), proposer.executor.collect
        proposer.executor.collect = lambda handle: passes.append(1) or collect(handle)
        waited, events = len(cuda.queue.waits), cuda.queue.event_waits
        seen = run(engine, requests)
        assert cuda.queue.waits[waited:] == []
        assert cuda.queue.event_waits - events == engine.stats().steps + len(passes)
    assert told(seen["a"]) == told(expected["a"])
    assert counts(engine)[0] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_fit_plans_it_on_a_gpu(pairs: dict[str, Pair], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, KV cache, a pass's workspace and graphs, but no second CUDA context."""
    monkeypatch.delenv("LLMBOX_KERNELS")
    pair, budget = pairs[kind], MemoryBudget(device="cuda", available=40 << 30, cores=8)
    site = KernelSite(device="cuda", has_native=False, capability=(9, 0))
    target = parse_config(pair.model)
    draft = None if pair.head is None else str(pair.head)
    mtp = "on" if draft is None else "auto"
    config = EngineConfig(model_path=str(pair.model), name="m", draft_path=draft, mtp=mtp, deterministic=True)
    alone = estimate(target.shape(), budget, replace(config, draft_path=None, mtp="off"))
    both = estimate(target.shape(), budget, config)
    assert both.weights_bytes > alone.weights_bytes
    assert (both.kv_bytes_per_token > alone.kv_bytes_per_token) is (kind != "medusa")
    graphs = 0 if kind == "medusa" else graphs_reserve(len(capture_sizes(both.max_running)))
    assert graphs < both.workspace_bytes - alone.workspace_bytes < graphs + CUDA_CONTEXT
    require_runnable(RunnablePlan.of(both, target), site, config)
    what = "a draft head" if pair.head else "the MTP layer"
    with pytest.raises(DeviceError, match=rf"{what} was requested, but the kernels.*--deterministic"):
        require_runnable(RunnablePlan.of(both, target), site, replace(config, deterministic=False))


def test_it_is_left_out_where_it_is_not_asked_for_and_cannot_run(pairs: dict[str, Pair]) -> None:
    budget = MemoryBudget(device="cuda", available=40 << 30, cores=8)
    target = parse_config(pairs["mtp"].model)
    config = EngineConfig(model_path=str(pairs["mtp"].model), name="m")
    plan = estimate(target.shape(), budget, config)
    assert plan.draft_method is None
    assert any("the MTP layer drafts no tokens: the kernels" in note for note in plan.notes)
    assert estimate(target.shape(), budget, replace(config, deterministic=True)).draft_method == "mtp"
