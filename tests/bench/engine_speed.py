"""Speed of the engine alone, no HTTP. Variants take turns, so that a drifting machine hits all of them.

    python -P tests/bench/engine_speed.py MODEL_DIR VARIANT... [--threads N] [--rounds N] [--work d1,d8,p512]

A VARIANT is a weight format (none, int8, int4, ...) on the C++ kernels, the path of a quantized folder of the
same shape, which is computed as it is, such a path and `+int8-head` for the same with `--quant-head int8`, or
`onednn` or `reference` for PyTorch's. Work: dN decodes N sequences
at once, pN computes a prompt of N tokens. Beside them stands what a plain read of memory reached meanwhile.
The best and the median of all rounds are shown, in tokens a second, and the median ratio to the first.
"""

import argparse
import os
import random
import statistics
import time

import torch

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

TORCH_BACKENDS = ("onednn", "reference")
ROUNDED = "+int8-head"
DECODE_STEPS = 24
DECODE_PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", default="d1,d8,d32,p512")
    options = parser.parse_args()
    engines = {name: load(options.model, name, options.threads) for name in options.variants}
    speeds: dict[tuple[str, str], list[float]] = {}
    reads = []
    for _ in range(options.rounds):
        for work in options.work.split(","):
            reads.append(read_bandwidth())
            for name, engine in engines.items():
                torch.set_num_threads(options.threads if name in TORCH_BACKENDS else 1)
                speeds.setdefault((work, name), []).append(run(engine, work))
    print(f"memory read by one thread: {min(reads):.0f} to {max(reads):.0f} GB/s")
    for (work, name), values in speeds.items():
        first = speeds[work, options.variants[0]]
        ratio = statistics.median(a / b for a, b in zip(values, first, strict=True))
        print(
            f"{work:6} {name.rpartition('/')[2]:20} best {max(values):8.1f}  "
            f"median {statistics.median(values):8.1f} tok/s  {ratio:.2f}"
        )


def load(model: str, variant: str, threads: int) -> Engine:
    native = variant not in TORCH_BACKENDS
    is_folder, folder = "/" in variant, variant.removesuffix(ROUNDED)
    os.environ["LLMBOX_KERNELS"] = "cpu" if native else variant
    config = EngineConfig(
        model_path=folder if is_folder else model,
        name=variant,
        device="cpu",
        dtype="bfloat16",
        quant=variant if native and not is_folder else "none",
        quant_head="int8" if folder != variant else "none",
        threads=threads,
        context=4096,
        kv_tokens=8192,
        max_running=64,
        token_budget=512,
        prefix_cache=False,
        speculate="off",
        memory_bytes=4 << 30,
    )
    return load_engine(config, lambda _: None)


def run(engine: Engine, work: str) -> float:
    """Tokens a second: of the prompt, or of the faster half of the decode steps."""
    size = int(work[1:])
    if work[0] == "p":
        add(engine, 1, size, 1)
        return size / sum(steps(engine))
    add(engine, size, DECODE_PROMPT, DECODE_STEPS)
    decoding = steps(engine)[-DECODE_STEPS + 2 :]
    return size / statistics.quantiles(decoding, n=4)[0]


def add(engine: Engine, count: int, prompt: int, output: int) -> None:
    rng = random.Random(0)
    for number in range(count):
        ids = [rng.randrange(engine.info.vocab_size) for _ in range(prompt)]
        params = SamplingParams(max_tokens=output, min_tokens=output, temperature=0.0)
        engine.add(AddRequest(request_id=f"r{number}", prompt_ids=ids, params=params))


def steps(engine: Engine) -> list[float]:
    times = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def read_bandwidth() -> float:
    """GB/s of summing 256 MB: below what several threads reach, but it moves with the machine."""
    block = torch.ones(64 << 20)
    torch.set_num_threads(1)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        block.sum()
        best = max(best, block.numel() * 4 / (time.perf_counter() - start) / 1e9)
    return best


if __name__ == "__main__":
    main()
