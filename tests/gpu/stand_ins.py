"""For what the engine needs beside torch and triton, where that is not installed."""

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace


def put_in_place() -> None:
    """Before the engine is imported."""
    if importlib.util.find_spec("psutil") is None:
        module = ModuleType("psutil")
        vars(module).update(virtual_memory=memory, cpu_count=cores)
        sys.modules["psutil"] = module


def cores(*, logical: bool = True) -> int | None:
    del logical  # the difference is not known here
    return os.cpu_count()


def memory() -> SimpleNamespace:
    """`psutil.virtual_memory`, as far as the engine reads it: bytes."""
    size = os.sysconf("SC_PAGE_SIZE")
    pages = {name: os.sysconf(f"SC_{name}_PAGES") for name in ("PHYS", "AVPHYS")}
    return SimpleNamespace(total=size * pages["PHYS"], available=size * pages["AVPHYS"])
