"""How much of a decoding step is spent in the kernels, and how much in Python around them.

    python -P tests/bench/step_share.py MODEL_DIR [FORMAT...] [--threads 2] [--batch 1] [--steps 60]
        [--rounds 5]

In processor time of the engine's own thread, which takes part in every kernel: other programs on a busy
machine hardly show. `around` is everything of `Engine.step` but the calls of the C++ library: scheduling,
building the batch, angles, sampling, taking the tokens over, and encoding them for the daemon. Told are the
medians of the round with the least of it.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.channel import encode
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams
from llmbox.kernels.dispatch import load_backend

PROMPT = 64


@dataclass(slots=True)
class Stopwatch:
    """Stands before the library's `run` and adds up this thread's time in it."""

    function: Any
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, *arguments: Any) -> None:
        began = time.thread_time()
        self.function(*arguments)
        self.seconds += time.thread_time() - began
        self.calls += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("formats", nargs="*", default=["none", "int8", "int4"])
    for name, value in (("threads", 2), ("batch", 1), ("steps", 60), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    library = load_backend("cpu").library
    watch = library.llmbox_run = Stopwatch(library.llmbox_run)
    for name in options.formats:
        engine = load(options.model, name, options.threads)
        rounds = [measure(engine, watch, options.batch, options.steps) for _ in range(options.rounds)]
        kernels, around, calls = min(rounds, key=lambda each: each[1])
        print(
            f"{name:10} {kernels * 1e3:7.2f} ms in {calls:.0f} calls of kernels, "
            f"{around * 1e3:6.3f} ms around them: {around / (kernels + around):.1%} of a step",
            flush=True,
        )
        del engine


def load(model: Path, quant: Any, threads: int) -> Engine:
    config = EngineConfig(
        model_path=str(model),
        name=model.name,
        device="cpu",
        quant=quant,
        threads=threads,
        context=2048,
        speculate="off",
    )
    return load_engine(config, lambda _: None)


def measure(engine: Engine, watch: Stopwatch, batch: int, steps: int) -> tuple[float, float, float]:
    """Seconds in kernels, seconds around them, calls: medians of the steps that decode."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=steps, min_tokens=steps, temperature=0.0)
    for number in range(batch):
        ids = [rng.randrange(engine.info.vocab_size) for _ in range(PROMPT)]
        engine.add(AddRequest(request_id=f"chatcmpl-{number:024d}", prompt_ids=ids, params=params))
    kernels, around, calls = [], [], []
    while engine.has_work:
        watch.seconds, watch.calls = 0.0, 0
        began = time.thread_time()
        encode(engine.step())
        spent = time.thread_time() - began
        kernels.append(watch.seconds)
        around.append(spent - watch.seconds)
        calls.append(watch.calls)
    decoding = slice(-(steps - 2), None)
    return tuple(statistics.median(each[decoding]) for each in (kernels, around, calls))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
