"""Prebuilt kernel libraries, compiled into the wheel by packaging/kernel_libraries.py. Torch-free.

A file's name has a digest of the sources and flags it was built from: one of other sources is never loaded.
"""

import hashlib
from pathlib import Path

from .compiling import DIGITS, FLAGS, digest_sources
from .isa import Level

DIGEST_BYTES = 32


def seal(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body + hashlib.sha256(body).digest())


def is_sealed(path: Path) -> bool:
    """Return whether the file exists and is undamaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


FOLDER = Path(__file__).parent / "prebuilt"


def prebuilt_path(level: Level) -> Path:
    """Return the path of the library of these sources."""
    return FOLDER / f"{level.name}-{digest_sources(*FLAGS, *level.flags)}.so"


def find_prebuilt(level: Level) -> tuple[Path | None, str]:
    """Return (prebuilt library for `level` or None, reason why it cannot be used).

    Owner and mode are not checked: whoever could replace the file could replace the Python code beside it.
    """
    path = prebuilt_path(level)
    if is_sealed(path):
        return path, ""
    if path.exists():
        return None, f"the prebuilt library {path} is damaged"
    others = [*FOLDER.glob(f"{level.name}-{'?' * DIGITS}.so")]
    return None, f"the prebuilt library {others[0]} is of other sources" if others else ""
