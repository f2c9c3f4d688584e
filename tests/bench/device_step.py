"""What a decoding step costs the host with the runner for GPUs: kernels, linears and graphs do nothing here.

    python -P tests/bench/device_step.py [--batch 1,64,256] [--mixed]

Microseconds a step by part, best of all turns, on the paths that a GPU takes, and how many operations of
torch and launches of kernels stand beside the graph. On a GPU each of those costs some microseconds more.

`--mixed`: a step of decoding rows and a prompt, which has no graph. Kernels are compiled and dispatched as
for a GPU of capability 9.0, and only their last call, to the driver, is left out.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"LLMBOX_KERNELS": "triton", "TRITON_CACHE_DIR": tempfile.gettempdir()}

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.late_device import device_engine
from support.real_engines import ask
from support.tiny_models import make_tiny_model

IS_MIXED = "--mixed" in sys.argv
if not IS_MIXED:
    from support.triton_interpreter import turn_on

    turn_on()

from llmbox.engine.core.engine import Engine
from llmbox.engine.core.request import Request
from llmbox.engine.core.step import ScheduledRequest, StepPlan
from llmbox.engine.device.device import HostDevice
from llmbox.engine.ipc.channel import encode
from llmbox.engine.ipc.messages import StepOutputs
from llmbox.engine.sampling_params import SamplingParams

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
    parser.add_argument("--mixed", action="store_true", help="steps with a prompt, microseconds a layer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.mixed:
        print(measure_mixed())
        return
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


DECODING, PROMPT, CONTEXT = 32, 200, 500
LAYERS = 2, 10


def measure_mixed() -> str:
    """Launch the same step of models of two depths: the difference is that of their layers."""
    from triton.runtime import JITFunction, driver

    driver.set_active(LaunchesNothing())
    launches: list[object] = []
    run = JITFunction.run

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(self)
        return run(self, *args, **kwargs)

    best, operations, kernels = list[float](), list[int](), list[int]()
    with as_if_on_a_gpu():
        for layers in LAYERS:
            runner, plan = mixed_step(layers)
            runner.launch(plan)
            seconds = []
            for _ in range(TURNS):
                started = time.perf_counter()
                runner.launch(plan)
                seconds.append(time.perf_counter() - started)
            best.append(1e6 * min(seconds))
            launches.clear()
            with Counted() as counted, mock.patch.object(JITFunction, "run", counting):
                runner.launch(plan)
            operations.append(counted.operations)
            kernels.append(len(launches))
    few, many = LAYERS
    a_layer, others, started = ((last - first) / (many - few) for first, last in (best, operations, kernels))
    return (
        f"{DECODING} decoding rows, a prompt of {PROMPT} tokens: {a_layer:.0f} us a layer ({started:.0f} "
        f"kernels, {others:.0f} operations), {best[0] - few * a_layer:.0f} us beside the layers"
    )


def mixed_step(layers: int) -> tuple[Any, StepPlan]:
    """Build a runner over empty weights and its step."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_hidden_layers": layers, "vocab_size": 300, "max_position_embeddings": 2048}
        model = make_tiny_model(Path(folder), tokenizer=False, **sizes)
        sizes = {"max_running": 256, "token_budget": 8192, "kv_tokens": 256 * 60}
        engine = device_engine(model, HostDevice(), None, dtype="bfloat16", **sizes)
    counts = [(CONTEXT, 1)] * DECODING + [(PROMPT, PROMPT)]
    rows = []
    for number, (end, count) in enumerate(counts):
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(request_id=str(number), prompt_ids=[3] * end, params=params)
        request.block_table = list(range(-(-end // engine.scheduler.pool.block_size)))
        rows.append(ScheduledRequest(request, end - count, count, samples=True))
    return engine.executor, StepPlan(rows)


class LaunchesNothing:
    """Triton's driver of a GPU, without one."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        shared = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 32, 0, 1024), get_device_properties=lambda _: shared
        )
        self.launcher_cls = lambda *_: lambda *_, **__: None
        self.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: 0
        self.get_active_torch_device = lambda: torch.device("cpu")


@contextmanager
def as_if_on_a_gpu() -> Iterator[None]:
    """Choose tiles as for an H100, load without a trial of kernels, and let linears only allocate."""
    from llmbox.kernels.triton import backend
    from llmbox.kernels.triton.linear import tile_config

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        del bias
        return x.new_empty(*x.shape[:-1], len(weight))

    with (
        mock.patch.object(backend, "why_it_fails", return_value=None),
        mock.patch.multiple(tile_config, capability=lambda _: (9, 0), multiprocessors=lambda _: 132),
        mock.patch.object(torch.nn.functional, "linear", linear),
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),  # a load on a CPU demands it
    ):
        yield


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
