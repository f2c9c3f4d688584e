"""Drafts where steps are launched ahead: what a request gets is that of steps without drafts, bit by bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.speculation.test_speculation import OPTIONS, mixed, repeating, told
from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest, RequestOutput
from support.device_ranks import device_ranks
from support.fake_cuda import Card, fake_cuda
from support.families import make_family
from support.grammars import learned
from support.lanes import first_in_the_suite
from support.late_device import FakeCapture, device_engine
from support.real_engines import ask, draft_at_no_price, load, run
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on

turn_on()

Outputs = dict[str, list[RequestOutput]]
SMALL: dict[str, Any] = {"dtype": "float32", "max_running": 3, "token_budget": 16, "context": 48}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return make_tiny_model(folder, tokenizer=False, num_hidden_layers=1, vocab_size=99)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    draft_at_no_price(monkeypatch)


def compare(engine: Engine, requests: Sequence[AddRequest], expected: Outputs) -> Outputs:
    """Return the outputs, which are the expected ones."""
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0
    stats = engine.stats()
    assert stats.draft_tokens >= stats.accepted_tokens > 0
    return seen


def accepted(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.accepted_tokens for output in outputs)


@pytest.mark.parametrize(
    "name", ["plain", *first_in_the_suite(["preempted", "chunks", "alone", "no cache", "bf16", "int8"])]
)
def test_what_a_request_gets_is_the_same(model: Path, name: str) -> None:
    """Also where a graph serves as many rows as the requests and their drafts have."""
    requests, capture = mixed(), FakeCapture()
    expected = run(learned(device_engine(model, **OPTIONS[name])), requests)
    engine = learned(device_engine(model, capture=capture, speculate="on", **OPTIONS[name]))
    engine.prepare()
    seen = compare(engine, requests, expected)
    assert capture.replays > 0
    ruled = [seen[f"few{n}"] for n in range(16) if n % 8]
    assert sum(map(accepted, ruled)) > 0, "what was drawn before decides, row by row"
    assert sum(accepted(seen[f"grammar{n}"]) for n in range(4)) > 0
    assert engine.stats().draft_methods["grammar"].accepted_tokens > 0
    if name == "preempted":
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("arch", ["gemma3_text", *first_in_the_suite(["qwen3_5_text", "qwen3_moe"])])
def test_other_layers(tmp_path: Path, arch: str) -> None:
    """Windows with blocks of their own; recurrent states that go back to the one before a wrong draft."""
    folder = make_family(tmp_path, arch) if arch == "qwen3_5_text" else make_tiny_model(
        tmp_path, arch=arch, tokenizer=False
    )  # fmt: skip
    requests = [repeating(number) for number in range(8)]
    expected = run(device_engine(folder), requests)
    compare(device_engine(folder, speculate="on"), requests, expected)


def test_a_second_answer_follows_the_first(model: Path) -> None:
    """Without rules that read the tokens before, all rows are drawn at once, each with its own noise."""
    requests = [
        ask("greedy", [5, 6, 7, 8, 9], 30, logprobs=1),
        ask("drawn", [5, 6, 7, 8, 9], 30, temperature=1.0, top_p=0.95, seed=5, logprobs=2),
        ask("ends", [9, 6, 7, 8], 30, temperature=1.0, seed=6, stop_token_ids=tuple(range(300))),
    ]
    engine = device_engine(model, speculate="on")
    first = run(engine, requests)
    steps = engine.stats().steps
    assert engine.stats().accepted_tokens == 0
    second = compare(engine, requests, first)
    assert accepted(second["greedy"]) > 10
    assert accepted(second["drawn"]) > 10
    assert engine.stats().steps - steps < steps / 2


def small_requests() -> list[AddRequest]:
    few: dict[str, Any] = {"allowed_token_ids": (20, 21), "temperature": 1.0}
    return [
        ask("ruled", [20, 21] * 4, 12, seed=3, repetition_penalty=1.1, frequency_penalty=0.3, **few),
        ask("words", [20, 21] * 4, 12, seed=8, bad_words=((20, 20, 21), (21, 21)), min_tokens=4, **few),
        ask("drawn", [9, 6, 7, 8, 5], 7, temperature=1.0, seed=5, top_p=0.9, logprobs=1),
    ]


@pytest.mark.filterwarnings("ignore:.*encountered in")  # numpy's, of rows that only fill up
def test_the_kernels_of_gpus_draw_the_same(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: penalties are counted on the device, as far as drafts are right."""
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    requests, options = small_requests(), {**SMALL, "deterministic": True}
    expected = run(device_engine(small, **options), requests)
    engine = device_engine(small, speculate="on", **options)
    seen = compare(engine, requests, expected)
    assert accepted(seen["ruled"]) + accepted(seen["words"]) > 0
    assert accepted(compare(engine, requests[2:], expected)["drawn"]) > 1, "it follows the first answer"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_a_whole_load_and_its_steps(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in for CUDA: graphs of more rows than requests run, and no step waits for the device but
    for its own event.
    """
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    requests, sizes = small_requests()[1:2], {**SMALL, "max_running": 2, "token_budget": 8}
    options = {**sizes, "deterministic": True, "device": "cuda", "memory_bytes": None}
    with fake_cuda(Card(multiprocessors=2)):
        expected = run(load(small, speculate="off", cuda_graphs=False, **options), requests)
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(small, **options)
        assert engine.scheduler.drafting._rows == options["token_budget"]
        while engine.prepare():
            pass
        waited, events = len(cuda.queue.waits), cuda.queue.event_waits
        compare(engine, requests, expected)
        assert cuda.queue.waits[waited:] == []
        assert cuda.queue.event_waits - events == engine.stats().steps


def test_ranks_draw_the_same(model: Path) -> None:
    """Each rank draws a part of the rows; what a draft made of a request, all of them know."""
    requests = [*(repeating(number) for number in range(8)), *mixed()[-4:]]
    with device_ranks(model, graphs=True, tp=2, speculate="off") as (engine, _):
        expected = run(learned(engine), requests)
    with device_ranks(model, graphs=True, tp=2, speculate="on") as (engine, ranks):
        rows = ranks[0].runner._sizes.draft_rows
        engine.scheduler.drafting._rows = rows
        seen = compare(learned(engine), requests, expected)
        assert sum(accepted(seen[f"grammar{n}"]) for n in range(4)) > 0, "workers get the masks after drafts"


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_guess_that_breaks_the_numbers_breaks_no_answer(
    model: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in a row: the request is computed again, without drafts."""
    engine, plain = device_engine(model, speculate="on"), device_engine(model)
    runner, breaking = engine.executor, list[bool]()
    logits = runner._model.logits

    def broken(hidden_SE: torch.Tensor, *others: object) -> torch.Tensor:
        found_SV = logits(hidden_SE, *others)
        if len(found_SV) > 1 and not breaking:
            breaking.append(True)
            found_SV = found_SV.clone()
            found_SV[0 if where == "first" else -1, 0] = torch.nan
        return found_SV

    monkeypatch.setattr(runner._model, "logits", broken)
    request = ask("a", [5, 6, 7] * 4, 30, logit_bias={9: 100.0})
    seen = run(engine, [request])["a"]
    assert breaking
    assert told(seen) == told(run(plain, [request])["a"])
    assert engine.stats().draft_tokens == 0
    engine.scheduler.check()
