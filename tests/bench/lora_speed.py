"""Speed of adapters: streams with an adapter each beside the same streams without, by turns, and loading one.

`python -P tests/bench/lora_speed.py MODEL [--quant int8] [--streams 8] [--rank 16] [--rounds 6]`
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.checkpoint.tensor_io import write_file
from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from support.real_engines import ask, load, runner_of

PAUSE = 0.2
"""Seconds between two adapters, in which memory for the next one is made ready."""


def write(model: Path, folder: Path, rank: int, seed: int) -> str:
    """Write an adapter of all linears in bfloat16; return its folder."""
    torch.manual_seed(seed)
    tensors = {}
    for name, entry in list_tensors(model).items():
        if ".layers." in name and name.endswith("_proj.weight"):
            outputs, inputs = entry.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, inputs) / 100).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(outputs, rank) / 100).bfloat16()
    folder.mkdir()
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    write_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def decode_speed(engine: Engine, asked: Sequence[AddRequest]) -> float:
    """Return tokens a second of all streams, without their prompts."""
    for request in asked:
        engine.add(request)
    outputs = 0
    while outputs < len(asked):  # prompts
        outputs += sum(len(each.token_ids) for each in engine.step().outputs)
    started, tokens = time.perf_counter(), 0
    while engine.has_work:
        tokens += sum(len(each.token_ids) for each in engine.step().outputs)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as home:
        folders = [write(options.model, Path(home) / str(n), options.rank, n) for n in range(options.streams)]
        sizes = {"memory_bytes": 4 << 30, "context": 512, "max_running": options.streams}
        engine = load(
            options.model, quant=options.quant, threads=options.threads, speculate="off", prefix_cache=False,
            plans_adapters=True, **sizes,
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # as an engine process does: a collection of all imports takes 100 ms
        seconds = []
        for number, folder in enumerate(folders * 5):
            time.sleep(PAUSE)
            # Half of them into free slots, the others in place of one that leaves.
            slot = number % (len(folders) * 5 // 2)
            started = time.perf_counter()
            runner_of(engine).adapters.load([(slot, ""), (slot, folder)])
            seconds.append(time.perf_counter() - started)
        runner_of(engine).adapters.load([(slot, "") for slot in range(len(seconds))])
        plain = [ask(f"r{n}", range(10 + n, 42 + n), options.tokens) for n in range(options.streams)]
        with_adapters = [replace(each, adapter=folder) for each, folder in zip(plain, folders, strict=True)]
        decode_speed(engine, with_adapters)
        ratios, speeds = [], []
        for _ in range(options.rounds):
            without, among = decode_speed(engine, plain), decode_speed(engine, with_adapters)
            speeds.append((without, among))
            ratios.append(among / without)
    median = [statistics.median(column) for column in zip(*speeds, strict=True)]
    last = statistics.quantiles(seconds, n=20)[-1]
    print(
        f"swap-in, {len(seconds)}: median {statistics.median(seconds) * 1e3:.0f} ms, 95 % within "
        f"{last * 1e3:.0f} ms, worst {max(seconds) * 1e3:.0f} ms, first {seconds[0] * 1e3:.0f} ms"
    )
    print(f"{options.streams} streams: {median[0]:.1f} tok/s without, {median[1]:.1f} with adapters")
    print(f"ratio: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
