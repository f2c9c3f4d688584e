"""What ranks on CPUs hand over in a decoding step: how often, and in how much processor time of rank 0.

    python -P tests/bench/rank_exchanges.py MODEL_DIR [--tp N] [--pp N] [--rows 1,8] [--threads N]

Counted where it happens, in the midst of real steps: there the weights have just gone through the caches, and
an exchange costs several times what it does in a loop of its own (`rank_sums.py`).
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.distributed.shm_communicator import ShmCommunicator
from llmbox.engine.distributed.step_codec import Link
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

STEPS = 24


class Counted:
    """Calls of some functions, and the processor time of this thread in them."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.count, self.seconds = 0, 0.0
        for name in names:
            setattr(owner, name, self._noting(getattr(owner, name)))

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            began = time.thread_time()
            result = function(*arguments)
            self.seconds += time.thread_time() - began
            self.count += 1
            return result

        return noting

    def told(self, steps: int) -> str:
        return f"{self.count / steps:.0f} in {1000 * self.seconds / steps:.2f} ms"

    def forget(self) -> None:
        self.count, self.seconds = 0, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    counted = {
        "sums and gathers": Counted(ShmCommunicator, "sum", "gather"),
        "states sent on": Counted(ShmCommunicator, "_send"),
        "steps told": Counted(Link, "send"),
    }
    engine = load(options)
    for rows in map(int, options.rows.split(",")):
        begin(engine, rows)
        for each in counted.values():
            each.forget()
        steps, seconds = decode(engine)
        told = ", ".join(f"{name} {each.told(steps)}" for name, each in counted.items())
        print(f"{rows} rows, a step of {1000 * seconds / steps:.1f} ms: {told}")


def load(options: argparse.Namespace) -> Engine:
    config = EngineConfig(
        model_path=options.model,
        name="counted",
        device="cpu",
        dtype="bfloat16",
        threads=options.threads,
        context=512,
        kv_tokens=1024,
        max_running=16,
        tp=options.tp,
        pp=options.pp,
    )
    return load_engine(config, lambda _: None)


def begin(engine: Engine, rows: int) -> None:
    """Until all of them decode."""
    drawn = engine.stats().output_tokens
    for row in range(rows):
        params = SamplingParams(max_tokens=STEPS, temperature=0.0)
        engine.add(AddRequest(request_id=f"{rows}-{row}", prompt_ids=[5, 6, 7 + row], params=params))
    while engine.stats().output_tokens < drawn + rows:
        engine.step()


def decode(engine: Engine) -> tuple[int, float]:
    """Steps, and the processor time of this thread."""
    before, began = engine.stats().steps, time.thread_time()
    while engine.has_work:
        engine.step()
    return engine.stats().steps - before, time.thread_time() - began


if __name__ == "__main__":
    main()
