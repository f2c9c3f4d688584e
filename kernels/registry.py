"""Names that LLMBOX_KERNELS may have. No torch: `doctor` asks too."""

from .cpu.isa import usable_levels

BEST_CPU = "cpu"
"""Stands for the best instruction set of this machine."""
TRITON = "triton"
TORCH = ("onednn", "reference")


def known_kernels() -> list[str]:
    """As far as this CPU can run them; whether a GPU can is another question."""
    return [BEST_CPU, *(f"cpu {level.name}" for level in usable_levels()), *TORCH, TRITON]
