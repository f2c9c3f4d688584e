"""Adapters in the runner of GPUs: graphs, prompts, heads, beside the CPU's runner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.core.adapter_slots import AdapterSlots
from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.kernels.lora import LoraTiles
from support.adapters import make_adapter, plain_tensors, write_adapter
from support.fake_cuda import Card, fake_cuda
from support.lanes import nightly
from support.late_device import FakeCapture, device_engine
from support.real_engines import ask, draft_at_no_price, hf_model, load, run, tokens
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on

turn_on()

SIZES: dict[str, Any] = {"dtype": "float32", "max_running": 4, "token_budget": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    return make_tiny_model(folder, arch="qwen3", tokenizer=False, num_hidden_layers=1, vocab_size=99)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of all linears, of another rank that graphs captured before have no programs for, and with a head and
    an embedding of its own.
    """
    home = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [
        {"r": 4},
        {"r": 20, "target_modules": ["q_proj", "down_proj", "lm_head"]},
        {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ]
    for number, kind in enumerate(kinds):
        make_adapter(hf_model(model), home / str(number), seed=number, **kind)
    return [home / str(number) for number in range(3)]


def adapted(folder: Path, request: AddRequest) -> AddRequest:
    return replace(request, adapter=str(folder))


def requests(adapters: Sequence[Path]) -> list[AddRequest]:
    return [
        adapted(adapters[0], ask("a", range(5, 27), 3)),
        ask("base", [7, 8, 9], 4),
        adapted(adapters[1], ask("b", [7, 8, 9], 4, temperature=0.8, seed=3, prompt_logprobs=2)),
        adapted(adapters[2], ask("c", [7, 8, 9], 3)),
        adapted(adapters[0], ask("a2", [30, 31], 2)),
    ]


def on_device(model: Path, **options: Any) -> Engine:
    engine = device_engine(model, **SIZES, **options)
    engine.scheduler.kv_cache.adapters = AdapterSlots(64, 1 << 30)
    return engine


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_tokens_are_those_of_the_cpu_runner(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    plain = load(model, **SIZES)
    expected = run(plain, requests(adapters))
    monkeypatch.setenv("LLMBOX_KERNELS", kernels)
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    capture = FakeCapture()
    engine = on_device(model, capture=capture)
    runner = engine.executor
    answers: dict[str, list[int]] = {}
    for one in requests(adapters):  # one after another: the second makes graphs anew
        answers |= tokens(engine, [one])
        while engine.prepare():
            pass
    assert (runner.adapted_graphs is None) == (kernels == "reference"), "its operations ask the device"
    wanted = {name: [t for o in outputs for t in o.token_ids] for name, outputs in expected.items()}
    assert answers == wanted
    replays, eager = capture.replays, []
    if kernels == "triton":
        monkeypatch.setattr(runner, "_decode", lambda *size, **_: eager.append(size))
    found = run(engine, requests(adapters))  # all are in memory
    assert {name: [t for o in outputs for t in o.token_ids] for name, outputs in found.items()} == wanted
    assert kernels == "reference" or (capture.replays > replays and not eager), "all decoding by graphs"
    told = [[e.logprob for e in output.prompt_logprobs or [] if e] for output in found["b"]]
    want = [[e.logprob for e in output.prompt_logprobs or [] if e] for output in expected["b"]]
    assert [n for each in told for n in each] == pytest.approx([n for each in want for n in each], abs=1e-4)
    engine.scheduler.check()


def test_steps_without_adapters_are_those_of_a_model_without(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They replay the model's own graphs, and nothing of adapters is made for them."""
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = on_device(model, capture=FakeCapture())
    runner = engine.executor
    made: list[object] = []
    monkeypatch.setattr(LoraTiles, "numbers", staticmethod(lambda *given: made.append(given)))
    while engine.prepare():
        pass
    tokens(engine, [ask("r", [5, 6, 7], 4)])
    assert runner.adapted_graphs is None
    monkeypatch.undo()
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    tokens(engine, [adapted(adapters[0], ask("a", [5, 6, 7], 4))])
    while engine.prepare():
        pass
    replayed: list[int] = []
    assert runner.graphs is not None
    replay = runner.graphs.replay
    monkeypatch.setattr(runner.graphs, "replay", lambda size: (replayed.append(size), replay(size)))
    tokens(engine, [ask("again", [5, 6, 7], 4)])
    assert replayed == [1, 1, 1]


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = on_device(model, capture=FakeCapture())
    alone = tokens(engine, [adapted(adapters[0], ask("good", [5, 6], 4))])
    other = write_adapter(tmp_path / "other", plain_tensors(inputs=9))
    found = run(engine, [adapted(other, ask("bad", [5, 6], 4)), adapted(adapters[0], ask("good", [5, 6], 4))])
    assert "another base" in (found["bad"][-1].error_message or "")
    assert [token for output in found["good"] for token in output.token_ids] == alone["good"]


def test_memory_of_a_gpu_that_is_full_fails_the_request(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = on_device(model)
    layers = engine.executor._model.adapters

    def full(*_: object) -> None:
        raise __import__("torch").OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layers, "_read", full)
    found = run(engine, [adapted(adapters[0], ask("a", [5, 6], 4)), ask("base", [5, 6], 2)])
    assert "--lora-memory" in (found["a"][-1].error_message or "")
    assert found["base"][-1].finish_reason == "length"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A mixture, and adapters of all its linears and of experts alone."""
    home = tmp_path_factory.mktemp("experts")
    model = make_tiny_model(
        home / "model", arch="qwen3_moe", tokenizer=False, num_hidden_layers=1, vocab_size=99
    )
    fused = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    for number, kind in enumerate(({"r": 4}, {"r": 20, **fused}, {"r": 3, **fused})):
        make_adapter(hf_model(model), home / str(number), seed=number, **kind)
    return model, [home / str(number) for number in range(3)]


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_experts_tokens_are_those_of_the_cpu_runner(
    experts: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = experts
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = tokens(load(model, **SIZES), requests(adapters))
    base = tokens(load(model, **SIZES), [ask("b", [7, 8, 9], 4, temperature=0.8, seed=3)])
    assert base["b"] != expected["b"]
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    capture = FakeCapture()
    engine = on_device(model, capture=capture)
    answers: dict[str, list[int]] = {}
    for one in requests(adapters):  # one after another: the second makes graphs anew
        answers |= tokens(engine, [one])
        while engine.prepare():
            pass
    assert answers == expected
    replays = capture.replays
    assert tokens(engine, requests(adapters)) == expected
    assert capture.replays > replays
    engine.scheduler.check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("kind", ["dense", nightly("experts")])
def test_a_loaded_gpu_serves_adapters(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """From the loader on, over the stand-in for CUDA: weights and rows lie there, and a graph serves an
    adapter that was loaded after it.
    """
    model, adapters = (
        request.getfixturevalue("experts")
        if kind == "experts"
        else (request.getfixturevalue("model"), request.getfixturevalue("adapters"))
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    options = {**SIZES, "max_running": 2, "context": 40, "speculate": "off"}
    asked = requests(adapters)[:4]
    expected = tokens(load(model, **options), asked)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(
            model, device="cuda", memory_bytes=None, plans_adapters=True, lora_bytes=1 << 20, **options
        )
        assert tokens(engine, asked) == expected
        while engine.prepare():
            pass
        assert cuda.card.graphs == 8, "two sizes, with adapters and without, and draws of each"
        slots = engine.scheduler.kv_cache.adapters
        assert slots is not None
        held = cuda.queue.waits[:]
        assert tokens(engine, asked) == expected
        assert cuda.queue.waits[len(held) :] == [], "nothing was loaded, and nothing waits"
        assert len(slots.digests) == 3, "all that were loaded are still there"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_drafts_of_a_request_have_its_adapter(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer follows the first, several rows at a time; its neighbor has another adapter."""
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    draft_at_no_price(monkeypatch)
    asked = [
        adapted(adapters[0], ask("a", [5, 6, 7, 8, 9], 7, temperature=1.0, seed=1)),
        adapted(adapters[1], ask("b", [5, 6, 7, 8, 9], 7, temperature=1.0, seed=2)),
    ]
    engine = on_device(model, speculate="on", deterministic=True)
    first = tokens(engine, asked)
    assert engine.stats().drafts == 0
    assert tokens(engine, asked) == first
    assert engine.stats().accepted_tokens > 4
