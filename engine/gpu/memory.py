"""How much KV memory is left on a GPU once everything else has been measured.

budget = weights + workspace (peak of a step of the largest size) + runtime + graphs + KV
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class MemoryMeter(Protocol):
    """Bytes of one GPU."""

    def allocated(self) -> int:
        """Of tensors."""
        ...

    def peak(self) -> int:
        """The most that `allocated` was since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def runtime(self) -> int:
        """What this process took that is no tensor: its context, kernels, libraries' own memory."""
        ...


class CudaMeter:
    def __init__(self, device: torch.device, free_before: int) -> None:
        """`free_before`: of `open_gpu`. What other processes take meanwhile counts as ours: better too little
        KV memory than too much.
        """
        self._device = device
        self._free_before = free_before

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def runtime(self) -> int:
        taken = self._free_before - torch.cuda.mem_get_info(self._device)[0]
        return max(0, taken - torch.cuda.memory_reserved(self._device))


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes, without KV."""

    weights: int
    workspace: int
    runtime: int
    graphs: int
    """Reserved: capturing ends where it is used up."""

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.runtime + self.graphs

    def blocks(self, budget: int, block_bytes: int, wanted: int) -> int:
        """KV blocks that fit beside it, the spare one not counted; below 1: none."""
        return min(wanted, (budget - self.total) // block_bytes - 1)
