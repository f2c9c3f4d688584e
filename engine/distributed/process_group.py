"""Process group of torch.distributed: NCCL between GPUs, gloo between CPU processes, all on this machine.

The rendezvous uses a file store in a folder of mode 0700, removed once all ranks have joined, so it opens no
port. Gloo, and NCCL during its setup, then listen on the loopback interface for the other ranks.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ..model_config.parallel_layout import ParallelLayout
from .custom_all_reduce import OneShotAllReduce, all_agree
from .fused_allreduce_rmsnorm import FusedAllReduceRMSNorm
from .torch_communicator import TorchCommunicator

STUCK_SECONDS = 600
"""Timeout of a collective, after which the process ends. Ranks that die or stop are noticed long before."""
SETTINGS: Final = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # By default ranks would poll each second for a request to dump the record of all collectives, through the
    # store file that is gone by then; and keep that record, with Python's stack, for each collective.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # Point-to-point transfers between stages are serialized with collectives on purpose: no warning in the
    # log.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Defaults of environment variables."""


def join(
    layout: ParallelLayout, device: torch.device, file: Path, *, ordered: bool, joined: bool = False
) -> TorchCommunicator:
    """Join the process group; return when all ranks have. `ordered`: see `TorchCommunicator`.

    `joined`: this stage's GPUs are NVLink peers, so kernels may wait for each other in mapped memory.
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
    # Each rank asks its own driver: where one gets another answer, no rank may wait for it in what follows.
    if layout.tp > 1 and not ordered and all_agree(stage, device, joined):
        # Fused sums are ordered too, but their norm is another kernel than the one for prompts.
        one_shot, fused = (
            OneShotAllReduce.prepare(stage, device),
            FusedAllReduceRMSNorm.prepare(stage, device),
        )
    return TorchCommunicator(
        layout, stage, ordered=ordered, device=device, back=back, one_shot=one_shot, fused=fused
    )


def stage_group(layout: ParallelLayout) -> dist.ProcessGroup:
    """Return the group of this rank's stage. Every rank creates the groups of all stages, as torch requires.

    A single stage uses the world group: a second communicator would allocate its buffers on every GPU again.
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
    """Destroy the process group before the process ends (`hardware.proc.exit_process`).

    NCCL's group is kept: destroying it waits until all CUDA graphs that contain its collectives are gone, up
    to 600 s. Its resources are freed with the process.
    """
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
