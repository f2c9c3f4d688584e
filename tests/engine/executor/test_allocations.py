"""Memory runs out at one allocation: inside a load, or inside a step between the writes of two layers' KV."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support import real_engines
from support.lanes import examples
from support.tiny_models import make_tiny_model

OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


class FailingAllocation(TorchDispatchMode):
    """Fails the operation with this number, counted from 1, as torch does where memory is out; 0: none."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            raise RuntimeError(f"{OUT_OF_MEMORY}: you tried to allocate 4096 bytes")
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, num_hidden_layers=2)


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain torch every allocation is an operation that can be counted."""
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    torch.set_num_threads(1)


def spread(count: int, wanted: int) -> list[int]:
    """About so many of the numbers 1 to count, evenly, the first and the last among them."""
    step = max(1, count // wanted)
    return sorted({*range(1, count + 1, step), count})


def load(directory: Path) -> Any:
    return real_engines.load(directory, kv_tokens=128)


def test_wherever_a_load_runs_out_of_memory_nothing_is_left(directory: Path) -> None:
    with FailingAllocation() as counting:
        engine = load(directory)
    assert counting.count > 50
    asked = [real_engines.ask("a", range(5, 25), 6)]
    expected = real_engines.tokens(engine, asked)
    del engine
    gc.collect()
    held = _live_bytes()
    for number in spread(counting.count, examples(40)):
        with pytest.raises(RuntimeError, match="can't allocate"), FailingAllocation(number):
            load(directory)
        gc.collect()
        assert _live_bytes() == held, f"allocation {number} of the load leaves tensors"
    assert real_engines.tokens(load(directory), asked) == expected


def test_wherever_a_step_runs_out_of_memory_no_token_changes(directory: Path) -> None:
    """The step raises, which ends the process; even the same engine would go on with the right KV."""
    engine = load(directory)

    def run(namespace: str, number: int = 0) -> tuple[dict[str, list[int]], int]:
        """Tokens of two requests that begin alike, and the operations that they took."""
        tokens: dict[str, list[int]] = {}
        for name, end in (("a", 30), ("b", 24)):
            message = real_engines.ask(name, range(5, end), 5)
            assert engine.add(replace(message, cache_namespace=namespace)) is None
            tokens[name] = []
        with FailingAllocation(number) as counting:
            while engine.has_work:
                try:
                    outputs = engine.step().outputs
                except RuntimeError as error:
                    if OUT_OF_MEMORY not in str(error):
                        raise
                    engine.scheduler.check()
                    continue
                for output in outputs:
                    assert output.finish_reason in {None, "length"}
                    tokens[output.request_id] += output.token_ids
        return tokens, counting.count

    expected, count = run("undisturbed")
    assert count > 200
    for number in spread(count, examples(60)):
        assert run(str(number), number)[0] == expected, f"operation {number}"
        assert run(str(number))[0] == expected, f"with what operation {number} has left in the cache"


def _live_bytes() -> int:
    return sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)
