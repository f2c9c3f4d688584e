"""Compiles what whole engines need, while correctness is checked: later they find it in Triton's cache.

An engine compiles its kernels one after another as it loads; of several at once each has a core of its own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from gpu import apart
from gpu.report import Report
from gpu.shapes import SHAPES

BYTES = 9 << 30
"""That one of them may take of the GPU: three layers of the 8B shape, steps of the largest size, graphs."""
LAYERS = 3
"""Kernels are told the number of a layer, and Triton compiles apart for 0, 1 and others."""
PATIENCE = 30.0
"""Seconds that may be waited for the rest when correctness is done: engines would need them as well."""


def begin(sections: Sequence[str]) -> "subprocess.Popen[str] | None":
    """Only beside correctness, which no figure of speed is taken from."""
    sizes = [name.partition("-")[2] for name in sections if name.startswith("engine-")]
    if not sections or sections[0] != "correctness" or not sizes:
        return None
    command = [sys.executable, "-m", "gpu.ahead", *sizes]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def end(process: "subprocess.Popen[str] | None", report: Report) -> None:
    """It is gone when this returns: from now on the GPU is measured."""
    if process is None:
        return
    try:
        told, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        apart.kill_group(process)
        told, _ = process.communicate()
    done = ", ".join(told.splitlines())
    report.say(f"\nKernels compiled ahead, beside the checks, for {done or 'no engine'}.")


def main() -> None:
    from gpu.whole_engine import engine_variants
    from llmbox.engine.hardware.proc import bind_to_parent

    bind_to_parent(os.getppid())
    processes = at_once(torch.cuda.mem_get_info()[0], os.cpu_count() or 1)
    if not processes:
        return
    work = [(size, *variant) for size in sys.argv[1:] for variant in engine_variants(size)]
    with ProcessPoolExecutor(processes, get_context("spawn"), bind_to_parent, (os.getpid(),)) as pool:
        for done in as_completed([pool.submit(load, *each) for each in work]):
            print(done.result(), flush=True)


def at_once(free: int, cores: int) -> int:
    """Processes: checks need half of both. 0 on cards that have no room for it."""
    return min(cores // 2, free // 2 // BYTES)


def load(size: str, name: str, options: dict[str, Any]) -> str:
    """What it was, and how long it took; or why there was nothing."""
    from gpu import engine_speed
    from gpu.whole_engine import CONTEXTS

    started = time.monotonic()
    try:
        shape = SHAPES[size] | {"num_hidden_layers": LAYERS}
        engine = engine_speed.engine(shape, context=CONTEXTS[0], memory_bytes=BYTES, **options)
        engine_speed.run(engine, engine_speed.add(engine, 2, 300, 40))
    except Exception as error:  # noqa: BLE001 - the section that measures it says so too
        return f"{size} {name} not at all ({type(error).__name__})"
    return f"{size} {name} in {time.monotonic() - started:.0f} s"


if __name__ == "__main__":
    main()
