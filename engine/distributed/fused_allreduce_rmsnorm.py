"""Fused all-reduce, residual addition and RMSNorm: runs `fused_allreduce_rmsnorm_kernel.py` over symmetric
memory.

Like `custom_all_reduce.py` it needs NVLink peers, and NO MACHINE WITH TWO GPUS HAS RUN IT YET: it is checked
against NCCL before its first use, and if that fails, all-reduce and norm run one after the other.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from .custom_all_reduce import BUFFER_BYTES, all_agree, shared_memory

ROWS: Final = 512
_WORD: Final = 16
_TRIAL: Final = (8, 1024)
_EPS: Final = 1e-5

log = logging.getLogger("llmbox.engine")


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
