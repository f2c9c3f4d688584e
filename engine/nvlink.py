"""Which GPUs are NVLink peers, through NVML. No torch."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def read_nvlink(uuids: Sequence[str]) -> tuple[frozenset[int], ...]:
    """Sets of positions in `uuids` whose devices are all joined to each other. Empty where nobody tells."""
    try:
        import pynvml  # noqa: PLC0415 - a machine with one GPU never pays for it

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - NVML fails in many ways; all of them mean "nothing known"
        return ()
    try:
        return islands(peers(pynvml, uuids), len(uuids))
    finally:
        pynvml.nvmlShutdown()


def peers(nvml: Any, uuids: Sequence[str]) -> set[frozenset[int]]:
    """Pairs. Through a switch as well: there a link's other end is the switch, so links are not counted."""
    found = set()
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        for first, second in combinations(range(len(handles)), 2):
            status = nvml.nvmlDeviceGetP2PStatus(
                handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
            if status == nvml.NVML_P2P_STATUS_OK:
                found.add(frozenset((first, second)))
    except (nvml.NVMLError, AttributeError):
        return set()
    return found


def islands(pairs: set[frozenset[int]], count: int) -> tuple[frozenset[int], ...]:
    """Largest first. Each device is in one: the first, by position, that it is a peer of everybody in."""
    groups: list[set[int]] = []
    for device in range(count):
        home = next((g for g in groups if all(frozenset((device, other)) in pairs for other in g)), None)
        if home is None:
            groups.append({device})
        else:
            home.add(device)
    joined = [frozenset(group) for group in groups if len(group) > 1]
    return tuple(sorted(joined, key=lambda group: (-len(group), min(group))))
