"""Files of blocks as a folder lists them, and who of them leaves first."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TURN_END_SECONDS: Final = 86_400
"""Time by which blocks at the ends of turns are kept longer than others."""
TURN_END: Final = ".turn"
PART: Final = ".part"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """File of a block, as the folder lists it."""

    path: Path
    size: int
    used_ns: int

    @property
    def owner(self) -> str:
        return self.path.parent.name

    @property
    def rank(self) -> int:
        """Return the sort key of eviction, smallest first."""
        kept = TURN_END_SECONDS * 10**9 if self.path.suffix == TURN_END else 0
        return self.used_ns + kept


def list_blocks(models: Iterable[Path]) -> list[StoredBlock]:
    """List the files of all blocks in the folders of these models."""
    found = []
    for owner in (owner for model in models for owner in subfolders(model)):
        with contextlib.suppress(OSError), os.scandir(owner) as entries:
            for entry in entries:
                if entry.name.endswith(PART):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(StoredBlock(Path(entry.path), status.st_size, status.st_mtime_ns))
    return found


def evict(blocks: list[StoredBlock], most: int, over: str, share: int) -> int:
    """Remove blocks until at most `most` bytes are left, and at most `share` of the owner `over`. Returns the
    bytes of the rest.
    """
    blocks.sort(key=lambda block: block.rank)
    usage = sum(block.size for block in blocks)
    own = [block for block in blocks if block.owner == over]
    excess = sum(block.size for block in own) - share
    for block in own:
        if excess <= 0:
            break
        gone = _remove(block)
        excess, usage = excess - gone, usage - gone
    for block in blocks:
        if usage <= most:
            break
        usage -= _remove(block)
    return usage


def subfolders(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [child for child in path.iterdir() if child.is_dir() and not child.is_symlink()]
    return []


def _remove(block: StoredBlock) -> int:
    """Remove a file; return the bytes that are gone with it."""
    try:
        block.path.unlink()
    except FileNotFoundError:
        return block.size
    except OSError:
        return 0
    return block.size
