"""How long ranks on a CPU take to sum: shared memory against gloo, taking turns in the same two processes.

python -P tests/bench/rank_sums.py [--rounds 400]
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from llmbox.engine.distributed.shm_communicator import ShmCommunicator, make_ends
from llmbox.engine.distributed.torch_communicator import join, leave
from llmbox.engine.model_config.parallel_layout import ParallelLayout

SIZES = (2048, 8192, 65536, 1 << 20)
"""Numbers in float32: one row of a small and of an 8B model, a few, many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ends = make_ends(ParallelLayout(2))
    with tempfile.TemporaryDirectory() as folder:
        rank = 0 if os.fork() else 1
        ours = ShmCommunicator(ParallelLayout(2, 1, rank), ends[rank])
        theirs = join(ParallelLayout(2, 1, rank), torch.device("cpu"), Path(folder) / "store", ordered=True)
        for size in SIZES:
            x = torch.ones(size)
            best = {"mesh": 1e9, "gloo": 1e9}
            for _ in range(rounds):
                for name, collective in (("mesh", ours), ("gloo", theirs)):
                    began = time.perf_counter()
                    collective.all_reduce(x)
                    best[name] = min(best[name], time.perf_counter() - began)
            if rank == 0:
                times = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in best.items())
                print(f"{size * 4:>8} bytes: {times}, ratio {best['gloo'] / best['mesh']:.1f}")
        leave()
        if rank:
            os._exit(0)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
