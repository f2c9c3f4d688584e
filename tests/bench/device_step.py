"""What a decoding step costs the host with the runner for GPUs: kernels, linears and graphs do nothing here.

    python -P tests/bench/device_step.py [--batch 1,64,256]

Microseconds a step by part, best of all turns, on the paths that a GPU takes, and how many operations of
torch and launches of kernels stand beside the graph. On a GPU each of those costs some microseconds more.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"LLMBOX_KERNELS": "triton", "TRITON_CACHE_DIR": tempfile.gettempdir()}

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.late_device import device_engine
from support.real_engines import ask
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on

turn_on()

from llmbox.engine.core.engine import Engine
from llmbox.engine.device.device import HostDevice
from llmbox.engine.ipc.channel import encode
from llmbox.engine.ipc.messages import StepOutputs

WARM_UP, TURNS = 20, 150
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p and penalties": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
}


class EmptyGraphs:
    bytes_taken = 0

    def capture(self, body: Callable[[], None], *, is_warm: bool = False) -> Callable[[], None]:
        del body, is_warm
        return lambda: None


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", default="1,64,256")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for batch in map(int, options.batch.split(",")):
        for name, params in PARAMS.items():
            parts = "  ".join(f"{part} {value:.0f}" for part, value in measure(batch, params).items())
            print(f"{batch:4} rows, {name:20} {parts}")


def measure(batch: int, params: dict[str, Any]) -> dict[str, float]:
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[object] = []

    def launch(function: object, *_: object, **__: object) -> None:
        launches.append(function)

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_hidden_layers": 1, "vocab_size": 300, "max_position_embeddings": 2048}
        model = make_tiny_model(Path(folder), tokenizer=False, **sizes)
        sizes = {"max_running": 256, "token_budget": 8192, "kv_tokens": 256 * 600}
        engine = device_engine(model, HostDevice(), EmptyGraphs(), dtype="float16", **sizes)
    # What no kernel has written is read as ids: it must be one.
    fake = mock.patch.multiple(torch, empty=torch.ones, empty_like=torch.ones_like)
    with mock.patch.object(InterpretedFunction, "run", launch), fake:
        while engine.prepare():
            pass
        for number in range(batch):
            assert engine.add(ask(f"chatcmpl-{number:024d}", range(3, 40), 500, **params)) is None
        for _ in range(WARM_UP):
            engine.step()
        best: dict[str, float] = {}
        for _ in range(TURNS):
            for part, seconds in turn(engine).items():
                best[part] = min(best.get(part, float("inf")), 1e6 * seconds)
        launches.clear()
        with Counted() as counted:
            turn(engine)
    whole = {"all": sum(best.values())}
    return best | whole | {"operations": counted.operations, "launches": len(launches)}


def turn(engine: Engine) -> dict[str, float]:
    """Seconds of each part of `Engine.step`."""
    scheduler, runner, spent = engine.scheduler, engine.executor, dict[str, float]()

    def timed(part: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        spent[part] = time.perf_counter() - started
        return result

    plan = timed("schedule", lambda: scheduler.schedule(engine._pipeline))
    engine._launched.append((plan, timed("launch", lambda: runner.launch(plan)), 0.0))
    older, handle, _ = engine._launched.popleft()
    result = timed("collect", lambda: runner.collect(handle))
    outputs = timed("update", lambda: scheduler.update(older, result))
    timed("encode", lambda: encode(StepOutputs(outputs=outputs, stats=engine.stats())))
    return spent


if __name__ == "__main__":
    main()
