"""GPUs: those that NVML reports, their NVLink peers and MIG slices, and data sheets of cards that need not be
in this machine.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Gpu:
    """NVIDIA GPU or MIG slice; memory in bytes."""

    index: int
    """Number here and in CUDA; see `name_gpus`."""
    name: str
    uuid: str
    total: int
    free: int
    bandwidth: float | None
    """Peak memory bytes per second, from bus width and clock."""
    is_slice: bool = False
    """True for a slice of a GPU in multi-instance mode (MIG)."""
    capability: tuple[int, int] | None = None
    """Compute capability."""


def read_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """Return the NVIDIA devices visible to this process; or none, and the reason."""
    try:
        import pynvml  # noqa: PLC0415 - a machine without an NVIDIA driver never pays for it

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - NVML fails in many ways; all of them mean "no GPU"
        return (), f"NVIDIA driver not usable: {error}"
    try:
        found = _all_gpus(pynvml)
    except pynvml.NVMLError as error:
        return (), f"NVIDIA driver does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()
    gpus = _visible(found)
    return gpus, None if gpus else "no NVIDIA device is visible (see CUDA_VISIBLE_DEVICES)"


def name_gpus() -> None:
    """Set CUDA_VISIBLE_DEVICES so that CUDA numbers GPUs as `read_gpus` does, in this process and its
    children.

    Must be called before CUDA starts. By default CUDA orders GPUs by estimated speed and the driver by bus
    address: a model would be loaded on another card than the one that it was planned for.
    """
    gpus, _ = read_gpus()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)


def _all_gpus(nvml: Any) -> list[Gpu]:
    """Return the GPUs that answer; a lost one does not hide the others. Raises NVMLError if none answers."""
    found: list[Gpu] = []
    problem: Exception | None = None
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found += _read_gpus(nvml, index)
        except nvml.NVMLError as error:
            problem = error
    if problem is not None and not found:
        raise problem
    return found


def _read_gpus(nvml: Any, index: int) -> list[Gpu]:
    """Return the GPU, or the MIG slices that it is divided into."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    parts = slices(nvml, handle)
    if parts is None:
        return [_read_gpu(nvml, index, handle, _bandwidth(nvml, handle))]
    return [_read_gpu(nvml, index, part, None, is_slice=True) for part in parts]


def _read_gpu(nvml: Any, index: int, handle: Any, bandwidth: float | None, *, is_slice: bool = False) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total=int(memory.total),
        free=int(memory.free),
        bandwidth=bandwidth,
        is_slice=is_slice,
        capability=_capability(nvml, handle),
    )


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return int(major), int(minor)
    except (nvml.NVMLError, TypeError):
        return None


def _bandwidth(nvml: Any, handle: Any) -> float | None:
    try:
        bits = nvml.nvmlDeviceGetMemoryBusWidth(handle)
        megahertz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
    except nvml.NVMLError:
        return None
    return 2.0 * float(megahertz) * 1e6 * float(bits) / 8  # two transfers a clock, as NVML counts clocks


def _visible(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, by nvidia-smi numbers or UUIDs, in its order; as
    CUDA does, stop at the first invalid entry. If it is not set, return all, fastest memory first.

    CUDA sees at most one slice of a divided GPU, and then no other GPU.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = gpus if wanted is None else _named(wanted.split(","), gpus)
    if part := next((gpu for gpu in chosen if gpu.is_slice), None):
        chosen = [part]
    elif wanted is None:
        chosen = sorted(gpus, key=lambda gpu: -(gpu.bandwidth or 0.0))
    return tuple(replace(gpu, index=place) for place, gpu in enumerate(chosen))


def _named(entries: list[str], gpus: list[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in entries:
        match = next((gpu for gpu in gpus if _names(entry.strip(), gpu)), None)
        if match is None:
            break
        chosen.append(match)
    return chosen


def _names(entry: str, gpu: Gpu) -> bool:
    return entry == str(gpu.index) or (entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---------------------------------------------------------------------------- NVLink and MIG


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


# ---------------------------------------------------------------------------- data sheets

# They give memory in "GB" of 2^30 bytes, as drivers count it, and bandwidth in decimal GB/s. Rates are those
# of dense products: the larger ones of data sheets are with 2:4 sparsity. 8-bit and 16-bit floats are counted
# with float32 accumulation.

_TERA: Final = 1e12


@dataclass(frozen=True, slots=True)
class GpuModel:
    """Model of a GPU, by its data sheet."""

    name: str
    title: str
    memory_gib: int
    gigabytes_per_second: int
    capability: tuple[int, int]
    """Compute capability."""
    float32: float
    """TFLOP/s outside the tensor cores; the others are those of tensor cores."""
    float16: float
    """TFLOP/s in bfloat16 and in float16."""
    int8: float
    """Tera-operations a second in int8."""
    float8: float | None = None
    """TFLOP/s in FP8; None before compute capability 8.9."""
    has_nvlink: bool = False
    """True if several in one box are NVLink peers as they are usually sold."""

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.memory_gib << 30

    @property
    def bandwidth(self) -> float:
        """Memory bytes per second."""
        return self.gigabytes_per_second * 1e9

    def flops(self, numbers: str) -> float:
        """Return FLOP/s of matrix products in `float32`, `bfloat16`, `float16`, `int8` or `float8`."""
        rates = {"float32": self.float32, "int8": self.int8, "float8": self.float8 or self.float16}
        return rates.get(numbers, self.float16) * _TERA


GPU_MODELS: Final = {
    each.name: each
    for each in (
        GpuModel("rtx3090", "RTX 3090", 24, 936, (8, 6), 35.6, 71, 284),
        GpuModel("rtx4080", "RTX 4080", 16, 717, (8, 9), 48.7, 97.5, 390, 194.9),
        GpuModel("rtx4090", "RTX 4090", 24, 1008, (8, 9), 82.6, 165.2, 660.6, 330.3),
        GpuModel("rtx5080", "RTX 5080", 16, 960, (12, 0), 56.3, 112.6, 450.2, 225.1),
        GpuModel("rtx5090", "RTX 5090", 32, 1792, (12, 0), 104.8, 209.5, 838, 419),
        GpuModel("rtxa6000", "RTX A6000", 48, 768, (8, 6), 38.7, 154.8, 309.7),
        GpuModel("rtx6000ada", "RTX 6000 Ada", 48, 960, (8, 9), 91.1, 364.2, 728.5, 728.5),
        GpuModel("a10", "A10", 24, 600, (8, 6), 31.2, 125, 250),
        GpuModel("l4", "L4", 24, 300, (8, 9), 30.3, 121, 242, 242),
        GpuModel("l40s", "L40S", 48, 864, (8, 9), 91.6, 362, 733, 733),
        GpuModel("a100-40gb", "A100 SXM 40 GB", 40, 1555, (8, 0), 19.5, 312, 624, has_nvlink=True),
        GpuModel("a100", "A100 SXM 80 GB", 80, 2039, (8, 0), 19.5, 312, 624, has_nvlink=True),
        GpuModel("h100-pcie", "H100 PCIe", 80, 2000, (9, 0), 51, 756, 1513, 1513),
        GpuModel("h100", "H100 SXM", 80, 3350, (9, 0), 67, 989, 1979, 1979, has_nvlink=True),
        GpuModel("h200", "H200 SXM", 141, 4800, (9, 0), 67, 989, 1979, 1979, has_nvlink=True),
        GpuModel("b200", "B200", 180, 7700, (10, 0), 75, 2250, 4500, 4500, has_nvlink=True),
    )
}
"""GPU models by name."""


def find_gpu_model(name: str) -> GpuModel | None:
    """Return a model by its name, in which case, spaces and hyphens do not count: "RTX 4090" is rtx4090."""
    by_letters = {_letters(known): model for known, model in GPU_MODELS.items()}
    return by_letters.get(_letters(name))


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
