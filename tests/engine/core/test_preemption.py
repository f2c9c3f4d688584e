"""Requests that gave their places away get the tokens that they get alone. A real engine on a tiny model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from support.late_device import device_engine
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

REQUESTS = [
    ask(f"r{number}", [5 + number, 9, 30 + number] * 6, 40, temperature=float(number % 2), seed=number)
    for number in range(3)
]


@pytest.fixture(autouse=True, scope="module")
def reference_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMBOX_KERNELS", "reference")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[int]]:
    engine = load(model, max_running=1, kv_tokens=2048, context=200)
    return {name: ids for each in REQUESTS for name, ids in tokens(engine, [each]).items()}


def disturbed(engine: Engine, others: dict[int, AddRequest]) -> dict[str, list[int]]:
    """The same requests, while after so many steps others arrive."""
    found: dict[str, list[int]] = {}
    for request in REQUESTS:
        assert engine.add(request) is None
    steps = 0
    while engine.has_work:
        if steps in others:
            assert engine.add(others[steps]) is None
        for output in engine.step().outputs:
            assert output.finish_reason in {None, "length", "stop"}
            found.setdefault(output.request_id, []).extend(output.token_ids)
        steps += 1
    return found


@pytest.mark.parametrize("runner", [load, device_engine], ids=["one step at a time", "one step ahead"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("by", ["a better class", "another caller"])
def test_a_displaced_request_has_its_own_tokens(
    model: Path, alone: dict[str, list[int]], by: str, prefix_cache: bool, runner: Callable[..., Engine]
) -> None:
    engine = runner(model, max_running=2, kv_tokens=2048, context=200, prefix_cache=prefix_cache)
    fields = {"priority": -1} if by == "a better class" else {"tenant": "quiet"}
    others = {step: replace(ask(f"other{step}", [step, 7, 8], 4), **fields) for step in (3, 9, 20, 21, 40)}
    found = disturbed(engine, others)
    assert engine.stats().preemptions >= 1
    assert {name: found[name] for name in alone} == alone
    assert all(len(found[other.request_id]) == 4 for other in others.values())
