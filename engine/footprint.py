"""What loading really took, to be held against what was estimated."""

import contextlib
import ctypes
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def memory_in_use(device: torch.device) -> int | None:
    """Bytes: of tensors on a GPU, of this process's own pages on a CPU. None where nobody tells.

    On a CPU what the allocator keeps of freed buffers (files read, weights before packing) goes back first.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("RssAnon:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
