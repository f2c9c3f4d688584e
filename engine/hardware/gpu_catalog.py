"""Catalog of GPUs: what data sheets say of cards that need not be in this machine.

Data sheets give memory in "GB" of 2^30 bytes, as drivers count it, and bandwidth in decimal GB/s. Rates are
those of dense products: the larger ones of data sheets are with 2:4 sparsity. 8-bit and 16-bit floats are
counted with float32 accumulation.
"""

import re
from dataclasses import dataclass
from typing import Final

from .machine import Cpu, Gpu, Machine, Memory

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

    def machine(self, count: int = 1) -> Machine:
        """Return a machine with `count` such GPUs and nothing else on them."""
        gpus = tuple(
            Gpu(
                number,
                self.title,
                f"GPU-{number}",
                self.memory,
                self.memory,
                self.bandwidth,
                capability=self.capability,
            )
            for number in range(count)
        )
        peers = (frozenset(range(count)),) if self.has_nvlink and count > 1 else ()
        return Machine(
            Cpu("", 1, 1, ()), Memory(self.memory, self.memory, limited_by_cgroup=False), gpus, None, peers
        )


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
