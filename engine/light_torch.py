"""Imports torch without what an engine on a CPU never uses.

Half of the import is about tracing, compiling and training. Nothing here does that, so those modules are left
out (`left_out.py`): whoever asks for one later gets it.

So is numpy, no dependency of ours: torch imports it where it finds it, and lacks but `numpy()` without.
"""

import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Final

from .left_out import LeftOut

LEFT_OUT: Final = frozenset(
    {
        "torch._functorch",
        "torch._higher_order_ops",
        "torch._logging",
        "torch._meta_registrations",
        "torch._native",  # kernels for GPUs
        "torch._subclasses",
        "torch.ao",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.fx",
        "torch.hub",
        "torch.masked",
        "torch.nested",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.optim",
        "torch.profiler",
        "torch.quantization",
        "torch.utils.data",
    }
)
KEPT: Final = "torch.fx.experimental.sym_node"
"""Operations look for it when they are given a number."""
IN_ORDER: Final = ("torch._functorch.predispatch", "torch.export", "torch._meta_registrations")
"""Some of them import each other in circles, which an import of all begins with these: so they come back."""
WHOLE: Final = "LLMBOX_WHOLE_TORCH"
"""Set where the light import failed."""
_NUMPY: Final = "numpy"
_NVIDIA: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Where there is a GPU that CUDA may find: of the driver, and what Windows lends to Linux in it (WSL 2)."""


def import_torch() -> None:
    """Once, before anything else imports torch. With a GPU all of it: its compilers trace.

    Whatever is raised, torch is not imported and cannot be in this process.
    """
    if "torch" in sys.modules or any(map(Path.exists, _NVIDIA)) or WHOLE in os.environ:
        return
    collects = gc.isenabled()
    gc.disable()  # fifty thousand objects are made, and all of them stay
    hides_numpy = sys.modules.setdefault(_NUMPY, None) is None  # type: ignore[arg-type]  # says: not there
    try:
        with LeftOut(LEFT_OUT, KEPT, IN_ORDER), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            import torch  # noqa: PLC0415

            torch.tensor(())  # looks for numpy, once for all
    finally:
        if hides_numpy:
            del sys.modules[_NUMPY]
        if collects:
            gc.enable()
