"""Probe whether Triton kernels run here. Triton needs a C compiler, Python's headers and the driver's
library.
"""

import torch

from .act_and_mul import gate_mul


def why_it_fails(device: torch.device) -> str | None:
    """Compile and run the smallest kernel. Return the failure in one line, or None."""
    try:
        result = gate_mul(torch.ones(1, 32, device=device), "silu").tolist()
    except Exception as error:  # noqa: BLE001 - compilers, linkers and drivers each have their own
        lines = str(error).strip().splitlines() or [""]
        return f"a first kernel failed: {type(error).__name__}: {lines[0][:200]}"
    right = all(abs(x - 0.7310586) < 1e-5 for x in result[0])
    return None if right else "a first kernel computed something else than it should"
