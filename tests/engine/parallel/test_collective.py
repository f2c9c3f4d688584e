"""torch.distributed between processes, as on GPUs: the same sums bit by bit, whatever way they go."""

import subprocess
import sys

SCRIPT = """
import os, sys, tempfile
from pathlib import Path
import torch
from llmbox.engine.parallel import collective
from llmbox.engine.parallel.group import join, leave
from llmbox.engine.parallel.layout import Layout

def numbers(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).bfloat16()

def sums(rank, ranks):
    together = join(Layout(ranks, 1, rank), torch.device("cpu"), ranks_file, ordered=True)
    parts = [numbers(each, 4001) for each in range(ranks)]
    wanted = collective.sum_in_order(parts)
    for limit in (1 << 20, 1):
        collective.GATHER_UP_TO = limit
        x = parts[rank].clone()
        together.sum(x)
        assert torch.equal(x, wanted)
    assert torch.equal(together.gather(parts[rank].view(-1, 1)), torch.stack(parts).unsqueeze(2))
    out = torch.empty(4001, dtype=torch.bfloat16)
    together.sum(parts[rank].float(), out)
    assert torch.equal(out, sum(part.float() for part in parts).bfloat16())
    leave()

def stages(rank, ranks):
    layout = Layout(2, 2, rank)
    together = join(layout, torch.device("cpu"), stages_file, ordered=True)
    x, residual = torch.full((3, 4), float(rank)), torch.full((3, 4), rank + 0.5)
    if layout.stage:
        together.receive(x, residual)
    else:
        together.send(x, residual)
    assert (float(x[0, 0]), float(residual[0, 0])) == (rank % 2, rank % 2 + 0.5)
    together.sum(x)
    assert float(x[2, 3]) == 1.0
    leave()

def all_ranks(work, ranks):
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            try:
                work(rank, ranks)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return all(os.waitpid(child, 0)[1] == 0 for child in children)

torch.set_num_threads(1)
folder = Path(sys.argv[1])
ranks_file, stages_file = folder / "ranks", folder / "stages"
sys.exit(0 if all_ranks(sums, 3) and all_ranks(stages, 4) else 1)
"""


def test_sums_gathers_and_stages(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
