"""NVLink peers and MIG slices of GPUs, read through NVML."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def read_nvlink(uuids: Sequence[str]) -> tuple[frozenset[int], ...]:
    """Return sets of positions in `uuids` whose devices are all NVLink peers. Empty if NVML is not usable."""
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
    """Return pairs of NVLink peers by P2P status. Counting links would miss peers behind an NVSwitch, where
    the other end of a link is the switch.
    """
    handles = [_handle(nvml, uuid) for uuid in uuids]
    pairs = combinations(range(len(handles)), 2)
    return {frozenset(pair) for pair in pairs if _are_peers(nvml, *(handles[place] for place in pair))}


def _handle(nvml: Any, uuid: str) -> Any | None:
    """Return the device handle; None for a device that was lost."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def _are_peers(nvml: Any, one: Any | None, other: Any | None) -> bool:
    """Return True if both are NVLink peers; False where the status is not available, as for MIG slices and
    with old drivers.
    """
    if one is None or other is None:
        return False
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except (nvml.NVMLError, AttributeError):
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def islands(pairs: set[frozenset[int]], count: int) -> tuple[frozenset[int], ...]:
    """Group devices into sets of mutual peers, largest first. A device joins the first group, by position,
    whose members are all its peers.
    """
    groups: list[set[int]] = []
    for device in range(count):
        home = next((g for g in groups if all(frozenset((device, other)) in pairs for other in g)), None)
        if home is None:
            groups.append({device})
        else:
            home.add(device)
    joined = [frozenset(group) for group in groups if len(group) > 1]
    return tuple(sorted(joined, key=lambda group: (-len(group), min(group))))


def slices(nvml: Any, handle: Any) -> list[Any] | None:
    """Return the handles of a GPU's MIG slices; None if it is not divided."""
    try:
        divided, _pending = nvml.nvmlDeviceGetMigMode(handle)
        if divided != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (nvml.NVMLError, AttributeError):  # cards and libraries without MIG
        return None
    found = (_slice(nvml, handle, index) for index in range(most))
    return [each for each in found if each is not None]


def _slice(nvml: Any, handle: Any, index: int) -> Any | None:
    """Return the handle of one slice; None for an unused number, because numbers of slices have gaps."""
    try:
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    except nvml.NVMLError:
        return None
