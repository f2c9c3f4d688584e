"""Kernel backends that this machine can run."""

import torch

from llmbox.kernels.cpu.isa import usable_levels
from llmbox.kernels.dispatch import TORCH_BACKENDS, backend_name, why_no_triton
from llmbox.kernels.support import TRITON


def backends() -> list[str]:
    """List the values of LLMBOX_KERNELS that this machine can run."""
    gpu = [TRITON] if torch.cuda.is_available() and why_no_triton(torch.device("cuda")) is None else []
    return [*gpu, *(backend_name(level) for level in usable_levels()), *TORCH_BACKENDS]
