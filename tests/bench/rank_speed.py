"""One model on one process and cut into ranks, with as many threads together: what the cut costs on a CPU.

    python -P tests/bench/rank_speed.py MODEL_DIR [--threads N] [--rounds N] [--work d1,d8] [--cuts one,tp2]

Each cut is an engine in a process of its own. All are loaded, and take turns: on a machine that others use,
tokens a second say little, and processor time of all ranks for a token says what was computed. Work: dN
decodes N sequences at once, pN computes prompts of N tokens, two of them. A cut such as tp2-ep has the
experts of a mixture whole (`--expert-parallel`), tp2-ep4 four copies of hot ones too (`--redundant-experts`):
of those that an earlier run has counted, if LLMBOX_REPACKED and LLMBOX_REPACKED_GB name a folder for it. The
balance of their rows is printed last, with what moves of experts took beside steps: rounds have to go on for
half a minute until rows are counted.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

DECODE_STEPS = 24
PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", default="d1,d8,p512")
    parser.add_argument("--cuts", default="one,tp2,pp2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options)
        return
    engines = {cut: Remote(options, cut) for cut in options.cuts.split(",")}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(options.rounds + 1):
        for work in options.work.split(","):
            for cut, engine in engines.items():
                result = engine.run(work)
                if number:  # the first warms up
                    found.setdefault((work, cut), []).append(result)
    for (work, cut), results in found.items():
        speeds = [each["tokens"] / each["seconds"] for each in results]
        costs = [1000 * each["cpu"] / each["tokens"] for each in results]
        print(
            f"{work:5} {cut:7} {min(speeds):7.2f} to {max(speeds):7.2f} tok/s, median "
            f"{statistics.median(speeds):7.2f}; processor {min(costs):7.2f} to {max(costs):7.2f} ms a token, "
            f"median {statistics.median(costs):7.2f}"
        )
    for cut, engine in engines.items():
        told = engine.run("balance")
        if told["ranks"]:
            print(
                f"{cut:7} busiest rank {told['ranks']:.3f} of the mean, {told['alone']:.3f} without copies; "
                f"{told['moves']:.0f} experts moved, median {1e3 * told['median']:.1f} ms, "
                f"most {1e3 * told['most']:.1f}"
            )
        engine.close()


class Remote:
    def __init__(self, options: argparse.Namespace, cut: str) -> None:
        passed = ["--threads", str(options.threads), "--dtype", options.dtype, "--engine", cut]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, options.model, *passed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def run(self, work: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        result: dict[str, float] = json.loads(self._process.stdout.readline())
        return result


def serve(options: argparse.Namespace) -> None:
    from llmbox.engine.config import EngineConfig
    from llmbox.engine.executor.build import load_engine

    sizes = {name: int(size) for name, size in re.findall(r"(tp|pp)(\d)", options.engine)}
    copies = re.search(r"-ep(\d+)", options.engine)
    config = EngineConfig(
        model_path=options.model,
        name=options.engine,
        device="cpu",
        dtype=options.dtype,
        speculate="off",
        threads=options.threads,
        context=2048,
        kv_tokens=4096,
        max_running=16,
        token_budget=256,
        prefix_cache=False,
        memory_bytes=4 << 30,
        expert_parallel="-ep" in options.engine,
        redundant_experts=int(copies[1]) if copies else 0,
        **sizes,
    )
    engine = load_engine(config, lambda _: None)
    ranks = [psutil.Process(pid) for pid in (None, *engine.info.worker_pids)]
    moves = time_moves(engine)
    print("{}", flush=True)
    for line in sys.stdin:
        work = line.strip()
        answer = balance(engine, moves) if work == "balance" else run(engine, ranks, work)
        print(json.dumps(answer), flush=True)
    engine.close()


def time_moves(engine: Any) -> list[float]:
    """Return a list that gets the seconds of each move of an expert."""
    experts, seconds = engine._experts, []
    if experts is None or experts._balancer is None:
        return seconds
    balancer, advance = experts._balancer, experts._balancer.advance

    def timed() -> bool:
        moved, started = balancer.moved, time.perf_counter()
        is_working = advance()
        if balancer.moved > moved:
            seconds.append(time.perf_counter() - started)
        return is_working

    balancer.advance = timed
    return seconds


def balance(engine: Any, moves: list[float]) -> dict[str, float]:
    stats = engine.stats()
    return {
        "ranks": stats.expert_rank_imbalance,
        "alone": stats.expert_rank_imbalance_without_copies,
        "moves": stats.expert_moves,
        "median": statistics.median(moves or [0.0]),
        "most": max(moves, default=0.0),
    }


def run(engine: Any, ranks: list[psutil.Process], work: str) -> dict[str, float]:
    from llmbox.engine.ipc.messages import AddRequest
    from llmbox.engine.sampling_params import SamplingParams

    size = int(work[1:])
    count, prompt, tokens = (2, size, 1) if work[0] == "p" else (size, PROMPT, DECODE_STEPS)
    for number in range(count):
        ids = [(7 * number + 13 * place) % 1000 + 5 for place in range(prompt)]
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        engine.add(AddRequest(request_id=f"{time.monotonic_ns()}-{number}", prompt_ids=ids, params=params))
    drawn = engine.stats().output_tokens
    while work[0] == "d" and engine.stats().output_tokens < drawn + count:  # prompts are not measured
        engine.step()
    before, done = cpu_seconds(ranks), engine.stats().output_tokens
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    made = count * prompt if work[0] == "p" else engine.stats().output_tokens - done
    return {"tokens": made, "seconds": seconds, "cpu": cpu_seconds(ranks) - before}


def cpu_seconds(ranks: list[psutil.Process]) -> float:
    """To a hundredth of a second, as the kernel counts."""
    return sum(sum(rank.cpu_times()[:2]) for rank in ranks)


if __name__ == "__main__":
    main()
