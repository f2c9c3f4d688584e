"""Snapshot of this machine's CPU, memory and GPUs, within the limits of this process's cgroup (versions 2
and 1).

`None` in a field means that the value is not known. Any ancestor of a cgroup may set a limit, so all of them
are read and the tightest one applies.
"""

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .nvml import read_nvlink, slices

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve")
_SYS_CPU = Path("/sys/devices/system/cpu")


def show_bytes(count: int, *, up: bool = False) -> str:
    """Format `count` bytes in GB (10^9 bytes), or in MB below 1 GB. `up` rounds up, so that the text never
    states less than `count`.
    """
    unit, name = (10**9, "GB") if count >= 10**9 else (10**6, "MB")
    tenths = -(-count * 10 // unit) if up else round(count * 10 / unit)
    return f"{tenths / 10:.1f} {name}"


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor as this process may use it."""

    model: str
    cores: int
    """Physical cores by scheduler affinity and cgroup quota; hyper-threads are not counted."""
    threads: int
    """Logical CPUs in the scheduler affinity."""
    features: tuple[str, ...]
    """Instruction-set extensions that kernels use."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory, in bytes."""

    total: int
    """Bytes of the machine, or of the tightest cgroup limit where that is less."""
    available: int
    """Bytes that can be allocated without swapping and without reaching a cgroup limit."""
    limited_by_cgroup: bool


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


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware that engines can use."""

    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...]
    no_gpu_reason: str | None
    """Reason why `gpus` is empty."""
    nvlink: tuple[frozenset[int], ...] = ()
    """Sets of GPUs (by `Gpu.index`) that are all NVLink peers of each other."""


NO_CUDA: Final = "this PyTorch has no CUDA in it: install llmbox with one that has"


def read_machine() -> Machine:
    """Read the hardware that engines can use: no GPU if the installed PyTorch has no CUDA."""
    gpus, reason = read_gpus()
    if gpus and not torch_has_cuda():
        gpus, reason = (), NO_CUDA
    nvlink = read_nvlink([gpu.uuid for gpu in gpus]) if len(gpus) > 1 else ()
    return Machine(read_cpu(), read_memory(), gpus, reason, nvlink)


# ---------------------------------------------------------------------------- cpu and memory


@cache
def torch_has_cuda() -> bool:
    """Return False if the installed torch is built without CUDA. Reads its version file without importing it,
    and assumes CUDA if the file does not say.
    """
    found = find_spec("torch")
    folders = (found and found.submodule_search_locations) or ()
    for folder in folders:
        try:
            text = (Path(folder) / "version.py").read_text("utf-8", "replace")
        except OSError:
            continue
        return re.search(r"^cuda\b[^=\n]*=\s*None\s*$", text, re.MULTILINE) is None
    return True


def read_cpu() -> Cpu:
    usable = _usable_cpus()
    cores = len({_core_of(cpu) for cpu in usable})
    quota = cpu_quota()
    if quota is not None:
        cores = max(1, min(cores, int(quota)))
    model, features = _cpuinfo()
    return Cpu(model, cores, len(usable), features)


def read_memory() -> Memory:
    import psutil  # noqa: PLC0415 - GPUs are checked with torch and Triton alone

    host = psutil.virtual_memory()
    left, limit = memory_left(), memory_limit()
    total = host.total if limit is None else min(host.total, limit)
    if left is None or left >= host.available:
        return Memory(total, host.available, limited_by_cgroup=False)
    return Memory(total, left, limited_by_cgroup=True)


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> tuple[str, str]:
    """Return (package, core) ids of the physical core, or the CPU number if the kernel has no topology."""
    topology = _SYS_CPU / f"cpu{cpu}" / "topology"
    try:
        package = (topology / "physical_package_id").read_text().strip()
        return package, (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)


def _cpuinfo() -> tuple[str, tuple[str, ...]]:
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip().lower(), value.strip())
    except OSError:
        pass
    flags = (facts.get("flags") or facts.get("features") or "").split()
    model = facts.get("model name") or platform.processor() or platform.machine()
    return model, tuple(feature for feature in _FEATURES if feature in flags)


# ---------------------------------------------------------------------------- gpus


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


_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_left(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes left below the tightest memory limit; None without a limit. Droppable page cache
    counts as free.
    """
    answers = [_left_in(group, *names) for group, names in _memory_groups(root, membership)]
    return min((left for left in answers if left is not None), default=None)


def memory_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the tightest memory limit in bytes; None without a limit."""
    limits = [_read(group / names[0]) for group, names in _memory_groups(root, membership)]
    return min((int(limit) for limit in limits if limit and limit.isdecimal()), default=None)


def cpu_quota(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the CPU quota in CPUs (version 2 only); None without a quota."""
    answers = []
    for group in _ancestors(root, _path_of(membership, "")):
        quota, _, period = (_read(group / "cpu.max") or "max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            answers.append(int(quota) / int(period))
    return min(answers, default=None)


def _memory_groups(root: Path, membership: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield groups to read, each with its names of the limit, the usage and the droppable-cache statistic."""
    for group in _ancestors(root, _path_of(membership, "")):
        yield group, ("memory.max", "memory.current", "inactive_file")
    for group in _ancestors(root / "memory", _path_of(membership, "memory")):
        yield group, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left_in(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read(group / limit_name), _read(group / usage_name)
    if not (limit and usage and limit.isdecimal() and usage.isdecimal()):  # "max" means no limit
        return None
    lines = (_read(group / "memory.stat") or "").splitlines()
    stats = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    return max(0, int(limit) - int(usage) + int(stats.get(cache_name, 0)))


def _path_of(membership: Path, controller: str) -> str:
    """Return this process's group in the hierarchy of a version 1 controller, or of version 2 for ''."""
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _ancestors(root: Path, path: str) -> Iterator[Path]:
    """Yield the group, its parents, and the root, which is the group itself inside a container."""
    group = root / path.strip("/")
    while group != root and group.is_relative_to(root):
        yield group
        group = group.parent
    yield root


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
