"""Instruction sets that the kernels are compiled for, best first. Torch-free, as the daemon uses them."""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    machine: str | None
    """Value of `platform.machine()`; None: any."""
    needs: frozenset[str]
    """Required flags in /proc/cpuinfo."""
    flags: tuple[str, ...]
    """Compiler flags."""
    flops: float
    """Sustained bfloat16 matrix throughput of a core in operations a second, within a factor of two."""


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_WIDE = "-mprefer-vector-width=512"

_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", _WIDE)

LEVELS = (
    Level("amx", "x86_64", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), 500e9),
    Level("avx512-bf16", "x86_64", _BF16, _BF16_FLAGS, 120e9),
    Level("avx512", "x86_64", _AVX512, ("-march=x86-64-v4", _WIDE), 60e9),
    Level("avx2", "x86_64", _AVX2, ("-march=x86-64-v3",), 30e9),
    Level("portable", None, frozenset(), (), 8e9),
)


def usable_levels() -> tuple[Level, ...]:
    """Return the levels that this CPU can run, best first; never empty."""
    flags, machine = cpu_flags(), platform.machine()
    return tuple(level for level in LEVELS if level.machine in {None, machine} and level.needs <= flags)


@cache
def cpu_flags() -> frozenset[str]:
    """Read the CPU's flags. Empty if the system does not report them: then the portable kernels run."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                return frozenset(value.split())
    except OSError:
        pass
    return frozenset()
