"""Imports torch without what an engine on a CPU never uses.

`torch._meta_registrations` describes thousands of operations for tensors without data (tracing, compiling),
a third of the import. Nothing here traces. It stays importable for whoever asks for it by name.

So does numpy, no dependency of ours: torch imports it where it finds it, and lacks but `numpy()` without.
"""

import gc
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Final

_UNUSED: Final = "torch._meta_registrations"
_NUMPY: Final = "numpy"
_NVIDIA: Final = Path("/dev/nvidiactl")


def import_torch() -> None:
    """Once, before anything else imports torch. With a GPU all of it: its compilers trace."""
    if "torch" in sys.modules or _NVIDIA.exists():
        return
    collects = gc.isenabled()
    gc.disable()  # a hundred thousand objects are made, and all of them stay
    sys.modules[_UNUSED] = ModuleType(_UNUSED)
    hides_numpy = sys.modules.setdefault(_NUMPY, None) is None  # type: ignore[arg-type]  # says: not there
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            import torch  # noqa: PLC0415
    finally:
        del sys.modules[_UNUSED]
        if hides_numpy:
            del sys.modules[_NUMPY]
        if collects:
            gc.enable()
    vars(torch).pop("_meta_registrations", None)
