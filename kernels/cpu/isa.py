"""Facts of this machine that kernels are chosen by: instruction sets, best first, and cores. Torch-free."""

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    machine: str | None
    """Value of `platform.machine()`; None: any."""
    needs: frozenset[str]
    """Required flags in /proc/cpuinfo; on Arm those are the names of HWCAP's bits."""
    flags: tuple[str, ...]
    """Compiler flags."""
    flops: float
    """Sustained bfloat16 matrix throughput of a core in operations a second, within a factor of two; more on
    some (`core_flops`)."""


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX_VNNI = _AVX2 | {"avx_vnni"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_WIDE = "-mprefer-vector-width=512"

_ARM_DOT = frozenset({"asimddp", "atomics", "asimdrdm", "crc32"})

_VNNI_FLAGS = ("-march=x86-64-v4", _WIDE, "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")

LEVELS = (
    Level("amx", "x86_64", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), 500e9),
    Level("avx512-bf16", "x86_64", _BF16, _BF16_FLAGS, 120e9),
    Level("avx512-vnni", "x86_64", _VNNI, _VNNI_FLAGS, 100e9),
    Level("avx512", "x86_64", _AVX512, ("-march=x86-64-v4", _WIDE), 100e9),
    Level("avx-vnni", "x86_64", _AVX_VNNI, ("-march=x86-64-v3", "-mavxvnni"), 30e9),
    Level("avx2", "x86_64", _AVX2, ("-march=x86-64-v3",), 30e9),
    Level("i8mm", "aarch64", _ARM_DOT | {"i8mm"}, ("-march=armv8.2-a+dotprod+i8mm",), 8e9),
    Level("dotprod", "aarch64", _ARM_DOT, ("-march=armv8.2-a+dotprod",), 8e9),
    Level("portable", None, frozenset(), (), 8e9),
)


def usable_levels() -> tuple[Level, ...]:
    """Return the levels that this CPU can run, best first; never empty."""
    flags, machine = cpu_flags(), platform.machine()
    usable = [level for level in LEVELS if level.machine in {None, machine} and level.needs <= flags]
    names = [level.name for level in usable]
    if "avx512-bf16" in names and is_intel():
        # Its bfloat16 dot product has half the throughput of two multiply-adds (docs/notes/cpu-kernels.md).
        here = names.index("avx512-bf16")
        usable.insert(names.index("avx512-vnni"), usable.pop(here))
    return tuple(usable)


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's flags. Empty if the system does not report them: then the portable kernels run."""
    facts = _cpu_facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


@cache
def is_intel() -> bool:
    return _cpu_facts().get("vendor_id") == "GenuineIntel"


_ZEN5: Final = 26
"""Family of AMD's CPUs from which on a core has four times the throughput of `Level.flops`: 500 Gop/s in
bfloat16 with AVX-512, where a Zen 4 has 220 and an Intel core without its tiles 140."""


@cache
def core_flops() -> float:
    """Return the sustained bfloat16 matrix throughput of a core with the best kernels, operations a second,
    within a factor of two.
    """
    facts, level = _cpu_facts(), usable_levels()[0]
    is_wide = facts.get("vendor_id") == "AuthenticAMD" and int(facts.get("cpu family") or 0) >= _ZEN5
    return level.flops * (4 if is_wide and level.name != "portable" else 1)


def _cpu_facts() -> dict[str, str]:
    """Read /proc/cpuinfo, of each key the first value; empty if the system does not have it."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return facts


_SYS_CPU = Path("/sys/devices/system/cpu")


def pick_cores(threads: int) -> list[int]:
    """Return at most `threads` logical CPUs of this process, on distinct physical cores first."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not usable:
        return list(range(threads))
    first: dict[str, int] = {}
    for cpu in usable:
        first.setdefault(_core_of(cpu), cpu)
    apart = list(first.values())
    return (apart + [cpu for cpu in usable if cpu not in apart])[:threads]


def _core_of(cpu: int) -> str:
    """Return an identifier of the physical core, or the CPU itself if the system does not report it."""
    try:
        return (_SYS_CPU / f"cpu{cpu}" / "topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


STRIP: Final = 16
TILE: Final = 32
"""Numbers of bfloat16 in a row of an AMX tile."""


def kv_width(head_dim: int, dtype: str, level: str) -> int:
    """Return the stored numbers for `head_dim`; `level` is the name of one of `LEVELS`."""
    step = TILE if (dtype, level) == ("bfloat16", "amx") else STRIP
    return -(-head_dim // step) * step


KERNEL_CACHE = "LLMBOX_KERNEL_CACHE"
"""Name of the environment variable that sets the folder."""


def cache_folder() -> Path:
    base = os.environ.get(KERNEL_CACHE)
    return Path(base) if base else user_cache_folder()


def user_cache_folder() -> Path:
    """Return the folder of daemons without `--data-dir`. Raises RuntimeError if the user has no home."""
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "llmbox" / "kernels"
