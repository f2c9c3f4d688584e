"""One-shot all-reduce of decoding steps between NVLink peers, over torch's symmetric memory.

Each rank writes its tensor into memory that all its peers have mapped, waits for their flags, then reads and
sums everything itself: one crossing of the links and no ring, as latency dominates for a few rows. NCCL does
the all-reduce of larger tensors and other dtypes.

Written against torch 2.11 (`torch.distributed._symmetric_memory`, `torch.ops.symm_mem`). It needs two NVLink
peers to run: NO SUCH MACHINE HAS RUN IT YET. If the preparation fails, NCCL is used instead; once prepared,
it is checked against NCCL before its first use.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUFFER_BYTES = 512 << 10
"""Bytes of each rank's buffer. Larger all-reduces are bound by bandwidth, where a ring moves less."""
KERNEL = "one_shot_all_reduce_copy_out"
_WORD = 16
# The kernel moves 16 bytes at a time.

log = logging.getLogger("llmbox.engine")


class OneShotAllReduce:
    """One-shot all-reduce over a prepared buffer."""

    def __init__(self, buffer: Tensor, group_name: str) -> None:
        """`buffer`: symmetric memory of BUFFER_BYTES bytes, after the rendezvous of the group's ranks."""
        self._buffer = buffer
        self._group_name = group_name

    @classmethod
    def prepare(cls, group: dist.ProcessGroup, device: torch.device) -> "OneShotAllReduce | None":
        """Prepare and check it; None where it cannot be used, with the reason logged.

        The same on all ranks.
        """
        one_shot: OneShotAllReduce | None = None
        try:
            buffer, _ = shared_memory(BUFFER_BYTES, group, device)
            one_shot = cls(buffer, group.group_name)
            getattr(torch.ops.symm_mem, KERNEL)  # raises where torch has none
        except Exception as error:  # noqa: BLE001 - drivers; all works without it
            log.info("sums go through NCCL alone, symmetric memory is not there: %s", error)
        if not all_agree(group, device, one_shot is not None):  # the kernel waits for all
            return None
        assert one_shot is not None
        return one_shot if all_agree(group, device, one_shot.agrees_with_nccl(group, device)) else None

    def takes(self, x: Tensor) -> bool:
        return (
            x.dtype in {torch.bfloat16, torch.float32}
            and x.is_contiguous()
            and x.nbytes <= BUFFER_BYTES
            and x.nbytes % _WORD == 0
        )

    def __call__(self, x: Tensor) -> None:
        """All-reduce `x` in place."""
        place = self._buffer[: x.nbytes].view(x.dtype)
        sum_into = getattr(torch.ops.symm_mem, KERNEL)
        sum_into(place, x.view(-1), "sum", self._group_name, x.view(-1))

    def agrees_with_nccl(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Compare one all-reduce with NCCL's. Another torch may refuse the arguments, then on all ranks."""
        ours = torch.randn(8, 1024, device=device, dtype=torch.bfloat16)
        theirs = ours.float()
        dist.all_reduce(theirs, group=group)
        try:
            self(ours)
        except Exception as error:  # noqa: BLE001 - all works without it
            log.info("sums go through NCCL alone, torch refuses %s: %s", KERNEL, error)
            return False
        return torch.allclose(ours.float(), theirs, rtol=0.02, atol=0.05)


def shared_memory(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Any]:
    """Allocate `size` bytes of symmetric memory on all ranks; return the tensor and torch's handle.

    Called by all ranks of the group. Raises on all where one of them has no such memory: the others would
    wait for it until the store times out.
    """
    import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415 - CUDA only

    memory: Any = symmetric
    buffer: Tensor | None = None
    problem: Exception | str = "another rank has none"
    try:
        buffer = memory.empty(size, dtype=torch.uint8, device=device)
    except Exception as error:  # noqa: BLE001 - drivers
        problem = error
    if not all_agree(group, device, buffer is not None):
        raise RuntimeError(problem)
    assert buffer is not None
    return buffer, memory.rendezvous(buffer, group)


def all_agree(group: dist.ProcessGroup | None, device: torch.device, works: bool) -> bool:
    """Return whether `works` holds on every rank of the group; None: of all stages."""
    agreed = torch.tensor([int(works)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return bool(int(agreed))
