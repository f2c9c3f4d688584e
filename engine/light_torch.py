"""Fast import of torch for engines on a CPU.

Half of the time that `import torch` takes goes into modules for tracing, compiling and training. The engine
uses none of them, so they are stubbed (`left_out.py`) and loaded only if something imports them later.
Measured: `import torch` takes 1.65 s of CPU time and 225 MB, `import_torch` 0.75 s and 177 MB.

numpy is hidden as well: it is no dependency of llmbox, torch imports it where it is installed, and without it
torch lacks only `Tensor.numpy()`.
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
"""Module that stays real: operators look it up when they get a Python number."""
IN_ORDER: Final = ("torch._functorch.predispatch", "torch.export", "torch._meta_registrations")
"""Modules to load first: some of the stubbed modules import each other in cycles, and a full `import torch`
enters the cycles here."""
WHOLE: Final = "LLMBOX_WHOLE_TORCH"
"""Environment variable that forces the full import; set after the fast import failed."""
_NUMPY: Final = "numpy"
_NVIDIA: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files that exist where CUDA may find a GPU: the Linux driver's, and that of WSL 2."""


def import_torch() -> None:
    """Import torch, once, before any other import of it. With a GPU it is imported in full: Triton and
    torch's compilers trace.

    After any exception torch is not imported and cannot be imported in this process.
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
