"""Folder of the KV cache on disk, shared by the engines of one daemon: `MODEL/OWNER/ADDRESS`, a file a block.

    format   version of the folder
    secret   random key of all addresses and owners
    lock     held shared by whoever uses the folder in one daemon, see `KVFolder.claim`
    usage    bytes of all files, changed under a lock of its own

Blocks leave by last use (the file's time), whichever model and process wrote them: who reads a file that is
gone computes its tokens.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from .block_file import ADDRESS_BYTES, MODEL_BYTES, BlockAddress, BlockKind
from .usage import NETWORK, PART, StoredBlock, UsageFile, evict, filesystem_of, list_blocks, subfolders

log = logging.getLogger(__name__)

FORMAT: Final = 1
DISK_RESERVE: Final = 0.05
"""Share of the disk that stays free."""
SLACK: Final = 0.01
"""Share of the limit that is freed at once."""
ABOUT: Final = "about.json"
_OWNER_DIGITS: Final = 16
_MODEL_NAME: Final = re.compile(f"[0-9a-f]{{{2 * MODEL_BYTES}}}")
_OWN: Final = frozenset({"format", "secret", "lock", "usage", "lost+found"})
"""Names beside the models' folders; the last one is of the file system."""


class KVFolderUnusable(Exception):  # noqa: N818 - the tier is left out
    """Folder cannot serve as a cache; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ModelDiskUsage:
    """Disk that the blocks of one model in one format take."""

    folder: Path
    about: dict[str, Any]
    """`model` (its directory), `format` and `origins`, as `KVFolder.add_model` got them; empty if damaged."""
    blocks: int
    size: int
    used: float
    """Unix time of the last use, in seconds."""


class KVFolder:
    """Layout, limit and owners of the folder at `root`. Errors of the disk are raised as OSError."""

    def __init__(self, root: Path, most_bytes: int, key_share: float = 1.0) -> None:
        """`key_share`: share of `most_bytes` that the blocks of one API key may take."""
        self.root = root
        self.most_bytes = most_bytes
        self._key_share = key_share
        self._secret = b""

    # ------------------------------------------------------------------ begin

    def open(self) -> None:
        """Make or check the folder. Raises KVFolderUnusable."""
        try:
            self._open()
        except OSError as error:
            raise KVFolderUnusable(
                f"{self.root} cannot be used ({error.strerror or error}): use a --data-dir on a disk that "
                "can be written, or set cache.kv_disk_gb to 0"
            ) from error

    def _open(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise KVFolderUnusable(f"others can write to {self.root}: chmod 700 it")
        if (kind := filesystem_of(self.root)) in NETWORK:
            raise KVFolderUnusable(
                f"{self.root} is on a network disk ({kind}): use a --data-dir on a local one"
            )
        self._refuse_foreign()
        with self._changing():
            version = self._version()
            if version > FORMAT:
                raise KVFolderUnusable(
                    f"{self.root} is of a newer llmbox (format {version}, this one knows {FORMAT}): "
                    "upgrade, or remove it"
                )
            if version < FORMAT:
                self._clear()
            self._secret = self._read_secret()

    def _refuse_foreign(self) -> None:
        """Raise KVFolderUnusable for a folder that holds other things, and was never one of blocks."""
        names = {child.name.removesuffix(PART) for child in self.root.iterdir()}
        if "format" in names or _models(self.root):
            return
        if foreign := sorted(names - _OWN):
            raise KVFolderUnusable(
                f"{self.root} holds other files ({foreign[0]}): move them, or use another --data-dir"
            )

    def _version(self) -> int:
        try:
            return int((self.root / "format").read_text())
        except FileNotFoundError:
            return 0
        except ValueError:
            return 0

    def _clear(self) -> None:
        for model in _models(self.root):
            shutil.rmtree(model)
        (self.root / "secret").unlink(missing_ok=True)
        _replace(self.root / "format", f"{FORMAT}\n".encode())

    def _read_secret(self) -> bytes:
        """Return the secret. Blocks of another one cannot be found: they go with it."""
        path = self.root / "secret"
        with contextlib.suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == hashlib.blake2b.MAX_KEY_SIZE:
                return secret
        for model in _models(self.root):
            shutil.rmtree(model)
        secret = os.urandom(hashlib.blake2b.MAX_KEY_SIZE)
        _replace(path, secret)
        return secret

    def claim(self) -> int:
        """Claim the folder for this daemon and its engines; return the descriptor that holds the claim.

        Raises KVFolderUnusable where another daemon has it.
        """
        handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise KVFolderUnusable(f"another daemon uses {self.root}: give this one a --data-dir") from None
        return handle

    # ------------------------------------------------------------------ names

    def owner(self, tenant: str) -> str:
        """Return the folder name of a caller."""
        return self._digest(b"owner", tenant.encode()).hex()[:_OWNER_DIGITS]

    def address(self, owner: str, kind: BlockKind, block_hash: bytes) -> BlockAddress:
        return BlockAddress(owner, self._digest(kind.encode(), owner.encode() + block_hash), kind)

    def _digest(self, purpose: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._secret, digest_size=ADDRESS_BYTES, person=purpose).digest()

    def add_model(self, digest: bytes, about: dict[str, Any]) -> Path:
        """Return the folder of a model's blocks, made if missing."""
        folder = self.root / digest.hex()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / ABOUT).exists():
            _replace(folder / ABOUT, json.dumps(about).encode())
        return folder

    # ------------------------------------------------------------------ room

    def reserve(self, size: int, over: str = "") -> bool:
        """Count `size` bytes that are to be written, after evicting what they displace. False: no room.

        `over`: owner who is over the share of a key, and whose own oldest blocks go first.
        """
        with self._changing() as file:
            usage = self._usage(file)
            has_room = usage + size <= self._room(usage)
            if not has_room or over:
                blocks = self.blocks()
                usage = sum(block.size for block in blocks)  # whatever was counted
                room = self._room(usage)
                if size <= room:  # else not even an empty cache would do
                    most = usage if usage + size <= room else int(room * (1 - SLACK)) - size
                    share = int(self.key_bytes * (1 - SLACK)) - size
                    usage = evict(blocks, most, over, share)
                has_room = usage + size <= self._room(usage)
            file.write(usage + size if has_room else usage)
        return has_room

    def release(self, size: int) -> None:
        """Take back a reservation, or count a removed file."""
        with self._changing() as file:
            file.write(self._usage(file) - size)

    @property
    def key_bytes(self) -> int:
        """Bytes that the blocks of one API key may take."""
        return int(self.most_bytes * self._key_share)

    def _room(self, usage: int) -> int:
        """Return the bytes that all blocks may take, as the disk is now."""
        disk = os.statvfs(self.root)
        free = disk.f_bavail * disk.f_frsize - int(DISK_RESERVE * disk.f_blocks * disk.f_frsize)
        return min(self.most_bytes, usage + free)

    def recount(self) -> dict[str, int]:
        """Count all files anew. Returns the bytes of each owner."""
        owners: defaultdict[str, int] = defaultdict(int)
        with self._changing() as file:
            for block in self.blocks():
                owners[block.owner] += block.size
            file.write(sum(owners.values()))
        return owners

    def usage(self) -> int:
        """Return the bytes of all files, as they were counted last; 0 if that is not known."""
        with contextlib.suppress(OSError):
            return UsageFile.glance(self.root / "usage") or 0
        return 0

    # ------------------------------------------------------------------ what people call

    def blocks(self, model: Path | None = None) -> list[StoredBlock]:
        """List the files of all blocks, or of one model's."""
        return list_blocks([model] if model is not None else _models(self.root))

    def models(self) -> list[ModelDiskUsage]:
        """List what each model takes, least recently used first."""
        found = []
        for folder in _models(self.root):
            blocks = self.blocks(folder)
            used = max((block.used_ns for block in blocks), default=0) / 1e9
            size = sum(block.size for block in blocks)
            found.append(ModelDiskUsage(folder, _about(folder), len(blocks), size, used))
        return sorted(found, key=lambda usage: usage.used)

    def prune(self, *, everything: bool = False) -> int:
        """Remove blocks of models that are gone or have changed, or all of them. Returns the bytes freed."""
        if not self.root.is_dir():
            return 0
        freed = 0
        for folder in _models(self.root):
            if everything or not _is_current(_about(folder)):
                freed += sum(block.size for block in self.blocks(folder))
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._remove_leftovers() or freed or self.usage() == 0:
                self.recount()
        return freed

    def _remove_leftovers(self) -> int:
        """Remove unfinished files of dead writers. Returns their number."""
        count, horizon = 0, time.time() - 60
        for part in chain.from_iterable(model.glob(f"*/*{PART}") for model in _models(self.root)):
            with contextlib.suppress(OSError):
                if part.stat().st_mtime < horizon:
                    part.unlink()
                    count += 1
        return count

    def purge(self, tenant: str) -> int:
        """Remove all blocks of one caller. Returns the bytes freed."""
        name = self.owner(tenant)
        return self._remove_owners(lambda owner: owner == name)

    def keep_owners(self, tenants: Collection[str]) -> int:
        """Remove the blocks of all other callers. Returns the bytes freed."""
        kept = {self.owner(tenant) for tenant in tenants}
        return self._remove_owners(lambda owner: owner not in kept)

    def _remove_owners(self, goes: Any) -> int:
        freed = 0
        for model in _models(self.root):
            for owner in subfolders(model):
                if goes(owner.name):
                    freed += sum(block.size for block in self.blocks(model) if block.owner == owner.name)
                    shutil.rmtree(owner, ignore_errors=True)
        if freed:
            self.recount()
        return freed

    # ------------------------------------------------------------------ files beside the blocks

    def _changing(self) -> contextlib.AbstractContextManager[UsageFile]:
        return UsageFile.locked(self.root / "usage")

    def _usage(self, file: UsageFile) -> int:
        known = file.read()
        return sum(block.size for block in self.blocks()) if known is None else known


def _about(model: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((model / ABOUT).read_bytes())
        return about if isinstance(about, dict) else {}
    return {}


def _is_current(about: dict[str, Any]) -> bool:
    """Return True if the model's files are those that its blocks were computed with."""
    origins = about.get("origins")
    if not isinstance(origins, list):
        return False
    return all(_is_same(origin) for origin in origins)


def _is_same(origin: Sequence[Any]) -> bool:
    try:
        path, size, mtime_ns = origin
        status = Path(path).stat()
    except (OSError, TypeError, ValueError):
        return False
    return (status.st_size, status.st_mtime_ns) == (size, mtime_ns)


def _models(root: Path) -> list[Path]:
    """Return the folders of models: nothing else in `root` is ever removed."""
    return [folder for folder in subfolders(root) if _MODEL_NAME.fullmatch(folder.name)]


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}{PART}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb") as stream:  # noqa: PTH123 - a descriptor
        stream.write(data)
    part.replace(path)
