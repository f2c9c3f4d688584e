"""All-reduces of decoding steps between NVLink peers, over torch's symmetric memory: one-shot, or fused with
the residual addition and RMSNorm after it (`fused_allreduce_rmsnorm_kernel.py`).

Each rank writes its tensor into memory that all its peers have mapped, waits for their flags, then reads and
sums everything itself: one crossing of the links and no ring, as latency dominates for a few rows. NCCL does
the all-reduce of larger tensors and other dtypes.

Written against torch 2.11 (`torch.distributed._symmetric_memory`, `torch.ops.symm_mem`). It needs two NVLink
peers to run: NO SUCH MACHINE HAS RUN IT YET. If the preparation fails, NCCL is used instead; once prepared,
it is checked against NCCL before its first use.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

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


ROWS: Final = 512
_TRIAL: Final = (8, 1024)
_EPS: Final = 1e-5


class FusedAllReduceRMSNorm:
    """Fused kernel with its peers, for sums of one width and dtype."""

    def __init__(self, run: Callable[..., tuple[Tensor, Any]], peers: Any) -> None:
        """`run`: `sum_norm_rows`; `peers`: its `Peers`, for ROWS rows and halves of BUFFER_BYTES."""
        self._run = run
        self._peers = peers
        self._kind: tuple[int, torch.dtype] | None = None
        """Width and dtype of all sums: see `sum_norm_rows`."""

    @classmethod
    def prepare(cls, group: dist.ProcessGroup, device: torch.device) -> "FusedAllReduceRMSNorm | None":
        """Prepare and check it; None where it cannot be used, with the reason logged. The same on all ranks.

        The kernel waits for all ranks, so none launches it before all have compiled it.
        """
        fused: FusedAllReduceRMSNorm | None = None
        try:
            fused = cls(*_over_symmetric_memory(group, device))
            fused.compile(device)
        except Exception as error:  # noqa: BLE001 - drivers and compilers; all works without it
            log.info("sums and norms go one after the other: %s", error)
            fused = None
        if not all_agree(group, device, fused is not None):
            return None
        assert fused is not None
        return fused if all_agree(group, device, fused.agrees_with_nccl(group, device)) else None

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Return whether tensors of this shape can be fused; the same on all ranks."""
        row_bytes = width * dtype.itemsize
        return (
            dtype in {torch.bfloat16, torch.float16, torch.float32}
            and 0 < rows <= ROWS
            and rows * row_bytes <= BUFFER_BYTES
            and row_bytes % _WORD == 0
        )

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, row_format: Any
    ) -> tuple[Tensor, Any]:
        """Run the kernel, see `sum_norm_rows`."""
        kind = x_TE.shape[1], x_TE.dtype
        assert self._kind in {None, kind}
        self._kind = kind
        return self._run(x_TE, residual_TE, weight_E, eps, row_format, self._peers)

    def compile(self, device: torch.device) -> None:
        x_TE = torch.zeros(_TRIAL, device=device, dtype=torch.bfloat16)
        self._run(x_TE, torch.zeros_like(x_TE), x_TE[0], _EPS, None, self._peers, compile_only=True)

    def agrees_with_nccl(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Compare two runs with NCCL, as the buffer has two halves. Every rank runs both, whatever the
        result: no rank waits for another.
        """
        first, second = self._agrees(group, device), self._agrees(group, device)
        return first and second

    def _agrees(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        x_TE = torch.randn(_TRIAL, device=device, dtype=torch.bfloat16)
        residual_TE = torch.ones_like(x_TE)
        total_TE = x_TE.float()
        dist.all_reduce(total_TE, group=group)
        total_TE += residual_TE.float()
        try:
            out_TE, _ = self._run(x_TE, residual_TE, torch.ones_like(x_TE[0]), _EPS, None, self._peers)
        except Exception as error:  # noqa: BLE001 - a launch that is refused is so on all ranks
            log.info("sums and norms go one after the other, a kernel is refused: %s", error)
            return False
        wanted_TE = total_TE * torch.rsqrt(total_TE.square().mean(-1, keepdim=True) + _EPS)
        return close(residual_TE, total_TE) and close(out_TE, wanted_TE)


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.float(), wanted, rtol=0.02, atol=0.05)


def _over_symmetric_memory(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[..., tuple[Tensor, Any]], Any]:
    from . import fused_allreduce_rmsnorm_kernel as sum_norm  # noqa: PLC0415 - needs Triton

    buffer, handle = shared_memory(2 * BUFFER_BYTES + 4 * ROWS * group.size(), group, device)
    buffer.zero_()
    starts = [address + getattr(handle, "offset", 0) for address in handle.buffer_ptrs]
    flags = [start + 2 * BUFFER_BYTES for start in starts]
    return sum_norm.sum_norm_rows, sum_norm.Peers(
        rank=group.rank(),
        buffers_t=torch.tensor(starts, device=device),
        flags_t=torch.tensor(flags, device=device),
        epochs_R=torch.zeros(ROWS, dtype=torch.int32, device=device),
        half_bytes=BUFFER_BYTES,
        memory=buffer,
    )
