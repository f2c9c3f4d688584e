"""Imports torch without what an engine on a CPU never uses.

`torch._meta_registrations` describes thousands of operations for tensors without data (tracing, compiling),
a third of the import. Nothing here traces. It stays importable for whoever asks for it by name.
"""

import gc
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

_UNUSED: Final = "torch._meta_registrations"
_NVIDIA: Final = Path("/dev/nvidiactl")


def import_torch() -> None:
    """Once, before anything else imports torch. With a GPU all of it: its compilers trace."""
    if "torch" in sys.modules or _NVIDIA.exists():
        return
    collects = gc.isenabled()
    gc.disable()  # a hundred thousand objects are made, and all of them stay
    sys.modules[_UNUSED] = ModuleType(_UNUSED)
    try:
        import torch  # noqa: PLC0415
    finally:
        del sys.modules[_UNUSED]
        if collects:
            gc.enable()
    vars(torch).pop("_meta_registrations", None)
