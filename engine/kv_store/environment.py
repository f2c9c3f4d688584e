"""Environment variables that give engines the folder and size of the KV cache on disk, and its disk."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER, MOST, KEY_SHARE = "LLMBOX_KV_FOLDER", "LLMBOX_KV_BYTES", "LLMBOX_KV_KEY_SHARE"
FREE_SHARE: Final = 0.2
"""Share of the free disk that the KV cache may take by default."""
DEFAULT_BYTES: Final = 50 * 10**9
NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs"}
    | {"fuse.glusterfs", "fuse.s3fs", "fuse.rclone"}
)
"""Types of file systems whose locks and delays nobody can rely on."""


def variables(folder: Path, most_bytes: int, key_share: float) -> dict[str, str]:
    return {FOLDER: str(folder), MOST: str(most_bytes), KEY_SHARE: str(key_share)}


def read(environ: Mapping[str, str] = os.environ) -> tuple[Path, int, float] | None:
    """Return the folder, its limit in bytes and the share of a key; None when the cache is off."""
    folder, most = environ.get(FOLDER), int(environ.get(MOST, 0))
    return (Path(folder), most, float(environ.get(KEY_SHARE, 1))) if folder and most > 0 else None


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
