"""Libraries that came with llmbox: compiled with its wheel, by packaging/kernel_libraries.py. No torch.

A file's name holds a digest of the sources and flags it was made from: one of other sources is never loaded.
"""

from pathlib import Path

from .compiling import DIGITS, FLAGS, digest_sources
from .isa import Level
from .sealed import is_sealed

FOLDER = Path(__file__).parent / "prebuilt"


def prebuilt_path(level: Level) -> Path:
    """Where one of these sources would be."""
    return FOLDER / f"{level.name}-{digest_sources(*FLAGS, *level.flags)}.so"


def find_prebuilt(level: Level) -> tuple[Path | None, str]:
    """(the library that came along for `level`, why it is not to be used).

    Who could replace it could replace the Python beside it, so its owner and mode are not looked at.
    """
    path = prebuilt_path(level)
    if is_sealed(path):
        return path, ""
    if path.exists():
        return None, f"the prebuilt library {path} is damaged"
    others = [*FOLDER.glob(f"{level.name}-{'?' * DIGITS}.so")]
    return None, f"the prebuilt library {others[0]} is of other sources" if others else ""
