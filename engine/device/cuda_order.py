"""The machine's GPUs by the numbers that CUDA gives them.

`machine.py` owns the order, and an engine process tells CUDA of it before that starts (`name_gpus`). Where
CUDA was there first, its own order counts: only names (UUIDs) tell which is which.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..hardware.machine import Machine, read_machine


def cuda_machine() -> Machine:
    """Starts CUDA, if that has not been done."""
    return in_order(read_machine(), cuda_uuids())


def cuda_uuids() -> list[str]:
    properties = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    return [str(getattr(each, "uuid", "")) for each in properties]


def in_order(machine: Machine, uuids: Sequence[str]) -> Machine:
    """With the GPUs of these names alone, in this order; as it is where some are not known."""
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
    """NVML says what it is of, CUDA does not."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
