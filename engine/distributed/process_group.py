"""The process group of all ranks: NCCL between GPUs, gloo between CPU processes, all on this machine.

Ranks find each other through a file in a folder of mode 0700 that is gone when all have met, so there is no
port to knock on for that. Gloo, and NCCL while it sets up, then listen on the loopback interface, for the
connections of the other ranks.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ..model_config.parallel_layout import ParallelLayout
from .custom_all_reduce import OneShotSum, all_agree
from .fused_allreduce_rmsnorm import FusedSum
from .torch_communicator import TorchCommunicator

STUCK_SECONDS = 600
"""An exchange that takes longer ends the process. Ranks that die or stop are noticed long before."""
SETTINGS: Final = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Ranks would look each second whether one wants the record of all exchanges written down, in a file that
    # is gone by then; and keep that record, with Python's stack, for each exchange.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # What stages hand on does take its turn among sums, as it should: no warning of it in the log.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Of the environment, where nobody has set them."""


def join(
    layout: ParallelLayout, device: torch.device, file: Path, *, ordered: bool, joined: bool = False
) -> TorchCommunicator:
    """Returns when all ranks are there. `ordered`: see `TorchCommunicator`. `joined`: this stage's GPUs are
    NVLink peers, so that kernels may wait for each other in memory that all have mapped.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(file), layout.ranks),
        rank=layout.rank,
        world_size=layout.ranks,
        timeout=timedelta(seconds=STUCK_SECONDS),
        device_id=device if device.type == "cuda" else None,
    )
    stage = stage_group(layout)
    back = dist.new_group(timeout=timedelta(seconds=STUCK_SECONDS)) if layout.pp > 1 else None
    dist.barrier()
    one_shot = fused = None
    # Each asks its driver: where one is told nothing, the others may not wait for it in what follows.
    if layout.tp > 1 and not ordered and all_agree(stage, device, joined):
        # Fused sums are in order too, but the norm behind them is another kernel than the one for prompts.
        one_shot, fused = OneShotSum.prepare(stage, device), FusedSum.prepare(stage, device)
    return TorchCommunicator(
        layout, stage, ordered=ordered, device=device, back=back, one_shot=one_shot, fused=fused
    )


def stage_group(layout: ParallelLayout) -> dist.ProcessGroup:
    """Of this rank's stage. Every rank makes the groups of all stages, as torch.distributed wants it.

    One stage is all ranks: a second communicator of the same would take its buffers on every GPU again.
    """
    if layout.pp == 1:
        world = dist.group.WORLD
        assert world is not None
        return world
    mine: dist.ProcessGroup | None = None
    for stage in range(layout.pp):
        ranks = ParallelLayout(layout.tp, layout.pp, stage * layout.tp).stage_ranks
        group = dist.new_group(ranks, timeout=timedelta(seconds=STUCK_SECONDS))
        if stage == layout.stage:
            mine = group
    assert mine is not None
    return mine


def leave() -> None:
    """Before the process ends, by `ending.end`.

    NCCL stays: to leave it waits until all graphs that hold its sums are gone, and 600 s where they are not.
    What it has goes with the process.
    """
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
