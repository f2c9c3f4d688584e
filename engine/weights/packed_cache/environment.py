"""Environment variables that give engines the folder and size limit of the packed-weight cache."""

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER, MOST = "LLMBOX_REPACKED", "LLMBOX_REPACKED_GB"


def variables(folder: Path, most_gb: float) -> dict[str, str]:
    return {FOLDER: str(folder), MOST: str(most_gb)}


def read(environ: Mapping[str, str] = os.environ) -> tuple[Path, int] | None:
    """Return the cache folder and its limit in bytes; None when the cache is off."""
    folder, most = environ.get(FOLDER), environ.get(MOST)
    if not folder or not most or float(most) <= 0:
        return None
    return Path(folder), int(float(most) * 1e9)
