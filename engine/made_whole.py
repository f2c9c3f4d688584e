"""A folder that appears in one move, with everything in it on the disk, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ModelError


def require_space(folder: Path, need: int) -> None:
    """In the place where `folder` is or will be. Raises ModelError."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(f"{folder} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed")


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """The folder to fill, beside `out`, which must not exist or be empty. Raises ModelError and OSError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there already: choose another place with --out")
    part = out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        sync(part)
        if out.is_dir():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync(folder: Path) -> None:
    """Files and folders in it too: a rename is no promise about what was written before."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
