"""Folder of compiled kernels. Imports little, as the daemon reads it before it starts its first engine."""

import os
from pathlib import Path

KERNEL_CACHE = "LLMBOX_KERNEL_CACHE"
"""Name of the environment variable that sets the folder."""


def cache_folder() -> Path:
    base = os.environ.get(KERNEL_CACHE)
    if base:
        return Path(base)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "llmbox" / "kernels"
