"""What the engine's own Python costs a step: schedule, take results, encode; the model costs nothing here.

    python -P tests/bench/step_overhead.py TREE... [--rounds N] [--batch 1,32,256]

A TREE is a checkout; several take turns, each in a process of its own, so that a drifting machine hits all.
Microseconds a step, best of all rounds.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

STEPS = 200
WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", default="1,32,256")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")]
    if options.inside:
        print(json.dumps([measure(batch) for batch in batches]))
        return
    best: dict[Path, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for tree in options.trees:
            seen = run_in(tree, options.batch)
            before = best.setdefault(tree, seen)
            best[tree] = [
                {name: min(old[name], new[name]) for name in new}
                for old, new in zip(before, seen, strict=True)
            ]
    for tree, results in best.items():
        for batch, result in zip(batches, results, strict=True):
            parts = "  ".join(f"{name} {micros:7.1f}" for name, micros in result.items())
            print(f"{tree!s:24} batch {batch:4}  {parts}")


def run_in(tree: Path, batch: str) -> list[dict[str, float]]:
    command = [sys.executable, "-P", __file__, str(tree), "--inside", "--batch", batch]
    environment = {"PYTHONPATH": str(tree / "packaging/tree")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(batch: int) -> dict[str, float]:
    """In the tree that PYTHONPATH names, this one or an older one."""
    from llmbox.engine.config import SchedulerConfig
    from llmbox.engine.core.kv_cache.block_pool import BlockPool
    from llmbox.engine.core.request import Request
    from llmbox.engine.core.scheduler import Scheduler
    from llmbox.engine.core.step import SampledToken, StepResult
    from llmbox.engine.ipc.channel import encode
    from llmbox.engine.ipc.messages import EngineStats, StepOutputs
    from llmbox.engine.sampling_params import SamplingParams

    config = SchedulerConfig(context=4096, max_running=batch, token_budget=64 * batch)
    scheduler = Scheduler(config, BlockPool(128 * batch, 16))
    params = SamplingParams(max_tokens=1000, temperature=0.0, stop_token_ids=(2, 3))
    for number in range(batch):
        ids = list(range(number, number + 40))
        scheduler.add(Request(request_id=f"chatcmpl-{number:024d}", prompt_ids=ids, params=params))
    best = dict.fromkeys(("schedule", "update", "encode"), float("inf"))
    for number in range(STEPS):
        clock = [time.perf_counter()]
        plan = scheduler.schedule()
        clock.append(time.perf_counter())
        tokens = {row.request.request_id: SampledToken(77) for row in plan.rows if row.samples}
        clock.append(time.perf_counter())
        outputs = scheduler.update(plan, StepResult(tokens=tokens))
        clock.append(time.perf_counter())
        encode(StepOutputs(outputs=outputs, stats=EngineStats()))
        clock.append(time.perf_counter())
        if number >= WARM_UP:
            spent = clock[1] - clock[0], clock[3] - clock[2], clock[4] - clock[3]
            for name, seconds in zip(best, spent, strict=True):
                best[name] = min(best[name], seconds * 1e6)
    return best | {"all": sum(best.values())}


if __name__ == "__main__":
    main()
