"""The memory that models may take together, by device."""

from typing import Literal

from llmbox.engine.errors import DeviceError
from llmbox.engine.machine import Machine

Place = Literal["cpu", "cuda"]

CPU_SHARE, CUDA_SHARE = 0.8, 0.9
"""Of all memory, where no budget is set: the rest is for the system and for what else runs here."""


def total_budget(machine: Machine, device: Place, gigabytes: float | None) -> int:
    """Bytes. A control group's limit counts as the machine's memory."""
    if device == "cuda":
        have = machine.gpus[0].total
        share = CUDA_SHARE
    else:
        memory = machine.memory
        have = memory.available if memory.limited_by_cgroup else memory.total
        share = CPU_SHARE
    return int(have * share) if gigabytes is None else min(int(gigabytes * 1e9), have)


def budgets(machine: Machine, device: Place, gigabytes: float | None) -> tuple[int, ...]:
    """Bytes of each memory of this kind: of every GPU on its own, or of the one that all CPUs share."""
    if device == "cpu":
        return (total_budget(machine, device, gigabytes),)
    asked = None if gigabytes is None else int(gigabytes * 1e9)
    totals = (gpu.total for gpu in machine.gpus)
    return tuple(int(total * CUDA_SHARE) if asked is None else min(asked, total) for total in totals)


def usable_device(machine: Machine, asked: str) -> Place:
    """Where a model would run. Raises DeviceError where there is no such device."""
    if asked == "cuda" and not machine.gpus:
        raise DeviceError(
            f"no GPU can be used ({machine.no_gpu_reason or 'none is visible'}): use --device cpu"
        )
    return device_of(machine, asked)


def device_of(machine: Machine, asked: str) -> Place:
    """Where a model would run."""
    return "cuda" if asked == "cuda" or (asked == "auto" and machine.gpus) else "cpu"
