"""Machine description with the GPUs in the order of CUDA's device numbers.

`hardware/machine.py` defines the order, and an engine process sets it for CUDA before that starts
(`name_gpus`). Where CUDA was started first, its own order counts, and UUIDs identify the GPUs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..hardware.machine import Machine, read_machine


def cuda_machine() -> Machine:
    """Read the machine, with GPUs in CUDA's order. Initializes CUDA."""
    return in_order(read_machine(), cuda_uuids())


def cuda_uuids() -> list[str]:
    properties = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    return [str(getattr(each, "uuid", "")) for each in properties]


def in_order(machine: Machine, uuids: Sequence[str]) -> Machine:
    """Restrict the machine to the GPUs with these UUIDs, in this order; unchanged where some are unknown."""
    places = {_bare(gpu.uuid): place for place, gpu in enumerate(machine.gpus)}
    order = [places[_bare(uuid)] for uuid in uuids if _bare(uuid) in places]
    if not order or len(order) < len(uuids):
        return machine
    number_of = {place: number for number, place in enumerate(order)}
    islands = ([number_of[place] for place in island if place in number_of] for island in machine.nvlink)
    return replace(
        machine,
        gpus=tuple(replace(machine.gpus[place], index=number) for number, place in enumerate(order)),
        nvlink=tuple(frozenset(island) for island in islands if len(island) > 1),
    )


def _bare(uuid: str) -> str:
    """Strip NVML's prefix, which CUDA's UUIDs do not have."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
