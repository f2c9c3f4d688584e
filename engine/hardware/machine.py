"""Snapshot of this machine's CPU, memory and GPUs, within the limits of this process's cgroup (versions 2
and 1).

`None` in a field means that the value is not known. Any ancestor of a cgroup may set a limit, so all of them
are read and the tightest one applies.
"""

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .gpus import Gpu, GpuModel, read_gpus, read_nvlink

_FEATURES = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
)
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


def make_gpu_machine(model: GpuModel, count: int = 1) -> Machine:
    """Return a machine with `count` GPUs of a model and nothing else on them."""
    gpus = tuple(
        Gpu(
            number,
            model.title,
            f"GPU-{number}",
            model.memory,
            model.memory,
            model.bandwidth,
            capability=model.capability,
        )
        for number in range(count)
    )
    peers = (frozenset(range(count)),) if model.has_nvlink and count > 1 else ()
    memory = Memory(model.memory, model.memory, limited_by_cgroup=False)
    return Machine(Cpu("", 1, 1, ()), memory, gpus, None, peers)


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
    usable = os.sched_getaffinity(0)
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


def _core_of(cpu: int) -> tuple[str, str]:
    """Return (package, core) ids of the physical core, or the CPU number if the kernel has no topology."""
    topology = _SYS_CPU / f"cpu{cpu}" / "topology"
    try:
        package = (topology / "physical_package_id").read_text().strip()
        return package, (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)


@cache
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


# ---------------------------------------------------------------------------- cgroups

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
