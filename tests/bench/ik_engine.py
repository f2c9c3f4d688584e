"""The engine alone beside ik_llama.cpp's library alone, by turns, each in a process of its own.

    python -P tests/bench/ik_engine.py MODEL --gguf DIR --package DIR --library libllama.so
        [--width bf16,int8,int4] [--work d1,d8,p512,p2048] [--rounds 6]

--package: the folder that PyPI's wheel of `ik-llama-cpp-python` is unpacked to, for its bindings. Its library
is made for AVX2: --library is one that was built from the sources in its sdist for this machine. --gguf: what
`to_gguf.py` makes of MODEL. Work: dN decodes N sequences of 64 tokens and more at once, in tokens a second of
the median step; pN computes a prompt of N tokens.

ik_llama.cpp repacks its weights, draws no tokens and has no scheduler; its flash attention is off where
there are several sequences: it asserts on random weights. llmbox draws greedily, with its defaults but
the prefix cache and drafts.
"""

import argparse
import importlib
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from llmbox.engine.config import EngineConfig
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

WIDTHS = {"bf16": ("none", "BF16"), "int8": ("int8", "Q8_0"), "int4": ("int4", "Q4_0")}
PROMPT, STEPS = 64, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--width", default="bf16,int8,int4")
    parser.add_argument("--work", default="d1,d8,p512,p2048")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    for width in options.width.split(","):
        quant, name = WIDTHS[width]
        file = options.gguf / f"{options.model.name}-{name}.gguf"
        sides = [
            Side(serve_llmbox, str(options.model), quant),
            Side(serve_ik, str(options.package), str(options.library), str(file)),
        ]
        for work in options.work.split(","):
            rates: list[list[float]] = [[], []]
            for number in range(options.rounds + 1):
                for place in (0, 1) if number % 2 else (1, 0):
                    rates[place].append(sides[place].run(work))
            own, theirs = (each[1:] for each in rates)  # the first round warms both
            ratios = sorted(a / b for a, b in zip(own, theirs, strict=True))
            print(
                f"{width} {work}: llmbox {statistics.median(own):.1f} tok/s, ik_llama.cpp "
                f"{statistics.median(theirs):.1f}, ratio {statistics.median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )
        for side in sides:
            side.process.kill()


class Side:
    def __init__(self, serve: Any, *arguments: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._ours.recv()

    def run(self, work: str) -> float:
        self._ours.send(work)
        return float(self._ours.recv())


def draw(count: int) -> list[int]:
    return [random.randrange(1000, 100_000) for _ in range(count)]


def serve_llmbox(pipe: Connection, model: str, quant: str) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(
        model_path=model, name="x", device="cpu", quant=quant, threads=2, context=4096, kv_tokens=8192,
        prefix_cache=False, speculate="off",
    )  # fmt: skip
    engine = load_engine(config, lambda _: None)
    while engine.prepare():
        pass
    pipe.send("ready")
    while True:
        work = pipe.recv()
        size, decodes = int(work[1:]), work[0] == "d"
        tokens = STEPS if decodes else 1
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0)
        for number in range(size if decodes else 1):
            ids = draw(PROMPT if decodes else size)
            engine.add(AddRequest(request_id=f"r{number}", prompt_ids=ids, params=params))
        times = []
        while engine.has_work:
            began = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - began)
        pipe.send(size / (statistics.median(times[4 - STEPS :]) if decodes else sum(times)))


def serve_ik(pipe: Connection, package: str, library: str, gguf: str) -> None:
    os.environ["IK_LLAMA_CPP_LIB_PATH"] = library
    sys.path.insert(0, package)
    ik = importlib.import_module("ik_llama_cpp._ctypes_api")
    ik.llama_backend_init()
    options = ik.llama_model_default_params()
    options.repack_tensors = True
    model = ik.llama_model_load_from_file(gguf.encode(), options)
    batch = ik.llama_batch_init(2048, 0, 1)
    contexts: dict[int, Any] = {}

    def context(sequences: int) -> Any:
        if sequences not in contexts:
            options = ik.llama_context_default_params()
            options.n_ctx, options.n_seq_max = max(4096, 256 * sequences), sequences
            options.n_threads = options.n_threads_batch = 2
            options.flash_attn = sequences == 1
            contexts[sequences] = ik.llama_init_from_model(model, options)
        return contexts[sequences]

    def step(on: Any, rows: list[tuple[int, int, int]]) -> float:
        """Compute rows of (token, position, sequence), with logits for the last one of each sequence."""
        last = {sequence: row for row, (_, _, sequence) in enumerate(rows)}
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
            batch.seq_id[row][0], batch.logits[row] = sequence, last[sequence] == row
        began = time.perf_counter()
        if ik.llama_decode(on, batch):
            raise RuntimeError("llama_decode failed")
        ik.llama_get_logits_ith(on, len(rows) - 1)
        return time.perf_counter() - began

    pipe.send("ready")
    while True:
        work = pipe.recv()
        size, decodes = int(work[1:]), work[0] == "d"
        on = context(size if decodes else 1)
        ik.llama_kv_cache_clear(on)
        if not decodes:
            pipe.send(size / step(on, [(token, place, 0) for place, token in enumerate(draw(size))]))
            continue
        for sequence in range(size):
            step(on, [(token, place, sequence) for place, token in enumerate(draw(PROMPT))])
        times = [
            step(on, [(token, PROMPT + number, sequence) for sequence, token in enumerate(draw(size))])
            for number in range(STEPS)
        ]
        pipe.send(size / statistics.median(times[4:]))


if __name__ == "__main__":
    main()
