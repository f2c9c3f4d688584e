"""Slices of GPUs in multi-instance mode (MIG), through NVML. No torch.

NVIDIA's MIG user guide, "CUDA device enumeration": a process sees one slice at most, and then no whole GPU.
"""

from typing import Any


def slices(nvml: Any, handle: Any) -> list[Any] | None:
    """Handles of a GPU's slices; None where it is not divided."""
    try:
        divided, _pending = nvml.nvmlDeviceGetMigMode(handle)
        if divided != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (nvml.NVMLError, AttributeError):  # cards and libraries that know nothing of it
        return None
    found = (_slice(nvml, handle, index) for index in range(most))
    return [each for each in found if each is not None]


def _slice(nvml: Any, handle: Any, index: int) -> Any | None:
    """Numbers of slices have gaps."""
    try:
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    except nvml.NVMLError:
        return None
