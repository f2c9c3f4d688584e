"""Use of the KV cache's folder: its files and who of them leaves first; the file `usage`, the bytes of all
blocks and the lock under which they change; the environment variables that give engines folder and size.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TURN_END_SECONDS: Final = 86_400
"""Time by which blocks at the ends of turns are kept longer than others."""
TURN_END: Final = ".turn"
PART: Final = ".part"
LOCK_SECONDS: Final = 5.0
"""Longest wait for the lock."""
_POLL_SECONDS: Final = 0.01
_DIGITS: Final = 20
"""Digits of the number, always as many: one write of the same length replaces it."""


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


class UsageFile:
    """Open file, locked. Nothing is truncated: a crash leaves the old number, the new one, or none."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    @contextlib.contextmanager
    def locked(cls, path: Path) -> Iterator["UsageFile"]:
        """Open the file, made if missing, and lock it. Raises OSError, also after `LOCK_SECONDS`."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(handle, path)
            yield cls(handle)
        finally:
            os.close(handle)

    @classmethod
    def glance(cls, path: Path) -> int | None:
        """Return the bytes without the lock, as any number read so may be old at once. Raises OSError."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(handle).read()
        finally:
            os.close(handle)

    def read(self) -> int | None:
        """Return the bytes; None if the file is empty or damaged."""
        text = os.pread(self._handle, 2 * _DIGITS, 0)
        number = text.removesuffix(b"\n")
        return int(number) if number != text and number.isdigit() else None

    def write(self, size: int) -> None:
        os.pwrite(self._handle, f"{max(0, size):0{_DIGITS}d}\n".encode(), 0)


def _lock(handle: int, path: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise OSError(errno.ETIMEDOUT, "another process keeps it locked", str(path)) from None
            time.sleep(_POLL_SECONDS)
        else:
            return


FOLDER_VARIABLE, BYTES_VARIABLE = "LLMBOX_KV_FOLDER", "LLMBOX_KV_BYTES"
KEY_SHARE_VARIABLE = "LLMBOX_KV_KEY_SHARE"
FREE_SHARE: Final = 0.2
"""Share of the free disk that the KV cache may take by default."""
DEFAULT_BYTES: Final = 50 * 10**9
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs"}
    | {"fuse.glusterfs", "fuse.s3fs", "fuse.rclone"}
)
"""Types of file systems whose locks and delays nobody can rely on."""


def cache_variables(folder: Path, most_bytes: int, key_share: float) -> dict[str, str]:
    """Return the environment variables that give engines the folder, its limit and the share of a key."""
    values = (folder, most_bytes, key_share)
    return dict(zip((FOLDER_VARIABLE, BYTES_VARIABLE, KEY_SHARE_VARIABLE), map(str, values), strict=True))


def read_variables(environ: Mapping[str, str] = os.environ) -> tuple[Path, int, float] | None:
    """Return the folder, its limit in bytes and the share of a key; None when the cache is off."""
    folder, most = environ.get(FOLDER_VARIABLE), int(environ.get(BYTES_VARIABLE, 0))
    return (Path(folder), most, float(environ.get(KEY_SHARE_VARIABLE, 1))) if folder and most > 0 else None


def default_bytes(folder: Path) -> int:
    """Return the bytes that the cache may take where no setting says so, by the disk's free space."""
    place = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    return min(DEFAULT_BYTES, int(FREE_SHARE * shutil.disk_usage(place).free))


def filesystem_of(path: Path, mounts: str = "/proc/self/mounts") -> str:
    """Return the type of the file system that holds `path`; empty where the system does not tell."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        at = f"{path.resolve()}/"
        for line in Path(mounts).read_text(errors="replace").splitlines():
            fields = line.split()
            if len(fields) < 3:
                continue
            mount = fields[1].replace("\\040", " ").rstrip("/") + "/"
            if at.startswith(mount) and len(mount) >= len(best):
                best, kind = mount, fields[2]
    return kind
