"""Packed-weight cache: a folder of files with least-recently-used eviction, their key (a digest of
checkpoint, format, kernels and shard), and the environment variables of the cache.

Failures of the cache never fail a load. Files are created atomically (written to a temporary file, synced,
renamed) and never changed, so readers need no lock. Writers and removers take one. A mapped file may be
removed: its pages stay until the reader ends. Torch-free, as the command line uses it too.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.files import MAX_BYTES, open_regular, read_regular
from ...checkpoint.index import weight_files
from ...checkpoint.safetensors import MAX_HEADER
from ...gguf.folder import gguf_of, projector_of
from ...gguf.reader import files_of
from ...hardware.machine import show_bytes
from .file import (
    DamagedPackedFile,
    MappedWeights,
    PackedContent,
    PackedIndex,
    PackedOrigin,
    note_verified,
    planned_bytes,
    read_index,
    write,
)

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackKey:
    directory: Path
    dtype: str
    quant: str
    layout: str
    """Memory layout of the kernels (`Packing.layout`)."""
    shard: str = ""
    """Shard of the model (`ParallelLayout.shard`); empty for all of it."""
    placement: str = ""
    """`ParallelLayout.placement_digest`: a new placement of experts replaces the file of the old one."""

    @property
    def format(self) -> str:
        """Human-readable format."""
        shard = f", part {self.shard}" if self.shard else ""
        weights = self.dtype if self.quant == "none" else f"{self.quant} ({self.dtype})"
        return f"{weights}, {self.layout.partition(' ')[0]}{shard}"

    def origins(self) -> tuple[PackedOrigin, ...]:
        """Return the checkpoint's files. Raises ModelError and OSError."""
        return tuple(PackedOrigin.of(file.resolve()) for file in self._files())

    def _files(self) -> list[Path]:
        file = gguf_of(self.directory)
        if file is None:
            return weight_files(self.directory)
        projector = projector_of(self.directory)
        return [*files_of(file), *([] if projector is None else [projector])]

    def digest(self) -> str:
        """Return the key as hex. Reads headers and config, not the weights. Raises ModelError and OSError."""
        digest = hashlib.sha256()
        parts = (self.dtype, self.quant, self.layout, self.shard, *filter(None, [self.placement]))
        config = read_regular(self.directory / "config.json", MAX_BYTES)
        for part in (*map(str.encode, parts), config):
            digest.update(part + b"\0")
        for file in self._files():
            digest.update(identity(file.resolve()).encode() + b"\0")
        return digest.hexdigest()[:32]


def identity(file: Path) -> str:
    """Identify a weights file: a blob of the hub's cache by its content hash, others by path and header."""
    if file.parent.name == "blobs" and SHA256.fullmatch(file.name):
        return file.name
    status = file.stat()
    with open_regular(file) as stream:
        length = min(int.from_bytes(stream.read(8), "little"), status.st_size, MAX_HEADER)
        header = hashlib.sha256(stream.read(length)).hexdigest()
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{header}"


FOLDER_VARIABLE, LIMIT_VARIABLE = "LLMBOX_REPACKED", "LLMBOX_REPACKED_GB"


def cache_variables(folder: Path, most_gb: float) -> dict[str, str]:
    return {FOLDER_VARIABLE: str(folder), LIMIT_VARIABLE: str(most_gb)}


def read_cache_variables() -> tuple[Path, int] | None:
    """Return the cache folder and its limit in bytes; None when the cache is off."""
    folder, most = os.environ.get(FOLDER_VARIABLE), os.environ.get(LIMIT_VARIABLE)
    if not folder or not most or float(most) <= 0:
        return None
    return Path(folder), int(float(most) * 1e9)


log = logging.getLogger(__name__)

SUFFIX, UNFINISHED, INTERRUPTED = ".weights", ".part", ".interrupted"
DISK_RESERVE = 0.05
"""Share of the disk that stays free."""


@dataclass(frozen=True, slots=True)
class PackedCacheEntry:
    """File in the folder. `index` is None for a damaged one."""

    path: Path
    size: int
    last_used: float
    """Unix time in seconds."""
    index: PackedIndex | None

    @property
    def useless(self) -> bool:
        """True for a damaged file, and where the checkpoint is gone or has changed."""
        return self.index is None or not all(origin.still_there for origin in self.index.origins)


class PackedWeightCache:
    """Cache folder, limited to `most_bytes`."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most = most_bytes
        self._unfinished: Path | None = None
        """Temporary file that this process is writing."""

    # ------------------------------------------------------------------ what loading calls

    def find(self, key: PackKey) -> MappedWeights | None:
        """Return the checked packed weights of `key`, or None. A damaged file is removed."""
        path = self._path(key)
        try:
            mapped = _mapped(path, key)
        except FileNotFoundError:
            return None
        except DamagedPackedFile as damage:
            self.discard(key, str(damage))
            return None
        except OSError as error:
            log.warning("packed weights in %s cannot be read: %s", path, error.strerror)
            return None
        return mapped

    def discard(self, key: PackKey, reason: str) -> None:
        log.warning("packed weights in %s cannot be used (%s): packed again", self._path(key), reason)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def store(self, key: PackKey, contents: Sequence[PackedContent]) -> bool:
        """Store packed weights; return whether they are in the cache now. The log says why not."""
        try:
            private_folder(self.folder)
            with self._locked():
                if self._path(key).exists():
                    return True  # another process was first
                self._sweep()
                self._replace(key)
                need = planned_bytes(contents)
                if (reason := self._make_room(need)) is not None:
                    log.warning("packed weights are not kept: %s", reason)
                    return False
                self._write(key, contents)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self.folder, error.strerror or error)
            return False
        log.info("packed weights are kept for the next load: %s (%s)", self._path(key), show_bytes(need))
        return True

    def drop_unfinished(self) -> None:
        """Remove the temporary file, from any thread: a write in progress then leaves nothing."""
        part, self._unfinished = self._unfinished, None
        if part is not None:
            with contextlib.suppress(OSError):
                part.unlink()

    def note_interrupted(self, key: PackKey) -> None:
        """Leave a mark that the process of a write ended before it."""
        with contextlib.suppress(OSError):
            self._path(key).with_suffix(INTERRUPTED).touch()

    def take_interrupted(self, key: PackKey) -> bool:
        """Return whether the last write was interrupted, and remove the mark."""
        try:
            self._path(key).with_suffix(INTERRUPTED).unlink()
        except OSError:
            return False
        return True

    def _write(self, key: PackKey, contents: Sequence[PackedContent]) -> None:
        digest, origins = key.digest(), key.origins()
        part = self._path(key).with_suffix(UNFINISHED)
        self._unfinished = part
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(handle, "wb", buffering=0) as out:  # noqa: PTH123 - a descriptor
                write(out, contents, key=digest, model=str(key.directory), format=key.format, origins=origins)
                os.fsync(handle)
            if origins == key.origins():  # otherwise the checkpoint changed meanwhile
                part.replace(self._path(key))
        finally:
            self.drop_unfinished()

    # ------------------------------------------------------------------ what people call

    def entries(self) -> list[PackedCacheEntry]:
        """List the files, least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix == SUFFIX:
                    with contextlib.suppress(OSError):
                        found.append(_entry(path))
        return sorted(found, key=lambda entry: entry.last_used)

    def prune(self, *, everything: bool = False) -> int:
        """Remove unusable files, or all of them; return the bytes freed."""
        if not self.folder.is_dir():
            return 0
        freed = 0
        with contextlib.suppress(OSError), self._locked():
            freed = self._sweep()
            for mark in self.folder.glob(f"*{INTERRUPTED}"):
                mark.unlink(missing_ok=True)
            for entry in self.entries():
                if everything or entry.useless:
                    freed += self._remove(entry)
        return freed

    # ------------------------------------------------------------------ room; with the lock held

    def _make_room(self, need: int) -> str | None:
        """Evict files until `need` bytes fit; return None, or why they cannot fit."""
        entries = self.entries()
        disk = shutil.disk_usage(self.folder)
        short = need + int(DISK_RESERVE * disk.total) - disk.free
        if need > self._most:
            return f"{need / 1e9:.1f} GB are more than cache.repacked_gb allows"
        if short > sum(entry.size for entry in entries):
            return f"the disk would have less than {DISK_RESERVE:.0%} free"
        over = max(short, sum(entry.size for entry in entries) + need - self._most)
        for entry in sorted(entries, key=lambda entry: (not entry.useless, entry.last_used)):
            if over <= 0:
                break
            log.info("packed weights not used for the longest time are removed: %s", entry.path)
            over -= self._remove(entry)
        return None if over <= 0 else "old ones cannot be removed"

    def _replace(self, key: PackKey) -> None:
        """Remove files of the same model and format, from before a kernel update or a new download."""
        for entry in self.entries():
            if entry.index and (entry.index.model, entry.index.format) == (str(key.directory), key.format):
                self._remove(entry)

    def _sweep(self) -> int:
        """Remove temporary files of dead writers: the lock is held, so no other process is writing."""
        freed = 0
        for part in self.folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                size = part.stat().st_size
                part.unlink()
                freed += size
        return freed

    def _remove(self, entry: PackedCacheEntry) -> int:
        try:
            entry.path.unlink()
        except OSError:
            return 0
        return entry.size

    def _path(self, key: PackKey) -> Path:
        return self.folder / f"{key.digest()}{SUFFIX}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _mapped(path: Path, key: PackKey) -> MappedWeights:
    with path.open("rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner != os.geteuid():
            raise DamagedPackedFile(f"it belongs to user id {owner}")
        index = read_index(file)
        if index.key != key.digest():
            raise DamagedPackedFile("it is of other weights")
        mapped = MappedWeights(file, index)
        with contextlib.suppress(OSError):  # a folder that cannot be written to
            os.utime(file.fileno())
            note_verified(file)
        return mapped


def _entry(path: Path) -> PackedCacheEntry:
    status = path.stat()
    index = None
    with contextlib.suppress(DamagedPackedFile), path.open("rb") as file:
        index = read_index(file)
    return PackedCacheEntry(path, status.st_size, status.st_mtime, index)


def private_folder(folder: Path) -> None:
    """Create the folder if missing. Raises PermissionError where other users could write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(1, f"others can write to it: chmod 700 {folder}")
