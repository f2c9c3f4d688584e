"""Values of LLMBOX_KERNELS. Torch-free, as `doctor` reads them."""

from .cpu.isa import usable_levels

BEST_CPU = "cpu"
"""Name of the best instruction set of this machine."""
TRITON = "triton"
TORCH = ("onednn", "reference")


def known_kernels() -> list[str]:
    """List the values that this CPU can run. A GPU is not looked at."""
    return [BEST_CPU, *(f"cpu {level.name}" for level in usable_levels()), *TORCH, TRITON]
