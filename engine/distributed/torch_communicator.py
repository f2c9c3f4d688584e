"""Collectives over torch.distributed: NCCL between GPUs, gloo between CPUs and in tests.

Where results must not depend on the rest of the batch, elements are summed in the order of ranks:
`all_reduce` of gloo and NCCL splits a tensor into as many pieces as there are ranks and sums each in an order
of its own, so an element's sum would depend on its place in the batch.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from ..model_config.parallel_layout import ParallelLayout
from .communicator import AsyncWork, rows_of_rank
from .custom_all_reduce import FusedAllReduceRMSNorm, OneShotAllReduce, all_agree

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Newer name of `all_gather_into_tensor`, which torch 2.11 does not have yet.

GATHER_UP_TO = 256 << 10
"""Bytes up to which an ordered all-reduce is one all-gather. A larger one has two phases: each rank sums a
slice, then the slices are gathered. That moves 2 (t - 1) / t of the tensor instead of t - 1 times it, and
synchronizes twice."""


class TorchCommunicator:
    """`Communicator` over process groups of torch.distributed."""

    def __init__(
        self,
        layout: ParallelLayout,
        stage: dist.ProcessGroup,
        *,
        ordered: bool,
        device: torch.device,
        back: dist.ProcessGroup | None = None,
        one_shot: OneShotAllReduce | None = None,
        fused: FusedAllReduceRMSNorm | None = None,
    ) -> None:
        """`stage`: group of this stage's ranks. `ordered`: always sum in the order of ranks.

        `back`: with several stages, a group of all ranks for `transfer_to_first_stage` alone, as the
        transfers of one group are serialized.
        """
        self._layout = layout
        self._device = device
        self._stage = stage
        self._back = back
        self._ordered = ordered
        self._one_shot = one_shot
        self._fused = fused

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> None:
        self._sum(x)
        if out is not None:
            out.copy_(x)

    def _sum(self, x: Tensor) -> None:
        if self._one_shot is not None and self._one_shot.takes(x):
            self._one_shot(x)
        elif self._layout.tp == 2 or not self._ordered:  # a + b is b + a
            dist.all_reduce(x, group=self._stage)
        elif x.nbytes <= GATHER_UP_TO:
            x.copy_(sum_in_order(list(self.all_gather(x))))
        else:
            self._sum_in_slices(x)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self._layout.tp, *x.shape)
        _all_gather(out.view(-1), x.view(-1), group=self._stage)
        return out

    def all_to_all_rows(self, x: Tensor) -> Tensor:
        tp, rows = self._layout.tp, len(x)
        shares = [rows_of_rank(rows, tp, rank) for rank in range(tp)]
        sizes = [share.stop - share.start for share in shares]
        mine = sizes[self._layout.tp_rank]
        out = x.new_empty(tp * mine, *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), [mine] * tp, sizes, group=self._stage)
        return out.view(tp, mine, x.shape[1]).transpose(0, 1).flatten(1)

    def exchange_rows(self, rows_TKE: Tensor, owners_TK: Tensor) -> None:  # noqa: ARG002 - asks no device
        """Add up: each row is zeros on all ranks but one, so the order does not matter."""
        dist.all_reduce(rows_TKE, group=self._stage)

    def send(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            dist.send(tensor.contiguous(), self._layout.rank + self._layout.tp)

    def receive(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.is_contiguous()
            dist.recv(tensor, self._layout.rank - self._layout.tp)

    def transfer(self, x: Tensor, source: int, destination: int) -> None:
        ranks = self._layout.stage_ranks
        if source == self._layout.tp_rank:
            dist.send(x, ranks[destination])
        else:
            dist.recv(x, ranks[source])

    def can_fuse(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return self._fused is not None and self._fused.takes(rows, width, dtype)

    def all_reduce_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, row_format: Any
    ) -> tuple[Tensor, Any]:
        """All-reduce in the order of ranks, add and norm, in one kernel."""
        assert self._fused is not None
        return self._fused(x_TE, residual_TE, weight_E, eps, row_format)

    def all_agree(self, works: bool) -> bool:
        return all_agree(None, self._device, works)

    def transfer_to_first_stage(self, x: Tensor) -> AsyncWork:
        assert x.is_contiguous()
        begin = dist.isend if self._layout.is_last else dist.irecv
        work = begin(x, self._layout.other_end, group=self._back)
        assert work is not None
        return work

    def _sum_in_slices(self, x: Tensor) -> None:
        tp = self._layout.tp
        size = -(-x.numel() // tp)
        flat = x.new_zeros(tp * size)
        flat[: x.numel()] = x.reshape(-1)
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat, group=self._stage)
        mine = sum_in_order(list(parts.view(tp, size)))
        x.copy_(self.all_gather(mine).view(-1)[: x.numel()].view(x.shape))


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of `parts` into `out`: neighbors in pairs, then pairs of those, in float32 and rounded
    once at the end.
    """
    while len(parts) > 2:
        pairs = [parts[i].float() + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs if len(parts) % 2 == 0 else [*pairs, parts[-1].float()]
    if len(parts) == 2 and parts[0].dtype == torch.float32:
        torch.add(*parts, out=out)  # one operation, rounded once
    else:
        out.copy_(sum_in_order(parts))


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Sum in float32, in the order of `parts`, and round once to their dtype."""
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part
    return total.to(first.dtype)


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
