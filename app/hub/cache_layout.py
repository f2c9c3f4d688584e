"""Hugging Face cache on disk: its repositories, written as huggingface_hub writes them."""

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..models.catalog import WEIGHT_SUFFIXES
from ..models.gguf_folders import is_projector
from .errors import DownloadStopped

INCOMPLETE = ".incomplete"
_MOVED = ".llmbox-"
"""Prefix of folders that are being put in place or deleted; only a crash leaves them behind."""


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Disk use of one repository in bytes: finished blobs, and unfinished downloads."""

    name: str
    folder: Path
    size: int
    partial: int
    revisions: tuple[str, ...]


class Repo:
    """One model repository in a cache."""

    def __init__(self, cache: Path, name: str) -> None:
        self.cache = cache
        self.name = name
        self._folder_name = f"models--{name.replace('/', '--')}"
        self.folder = cache / self._folder_name

    def blob(self, etag: str) -> Path:
        return self.folder / "blobs" / etag

    def partial(self, etag: str) -> Path:
        return self.folder / "blobs" / (etag + INCOMPLETE)

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    @contextlib.contextmanager
    def locked(self, etag: str, stop: threading.Event) -> Iterator[None]:
        """Hold the lock that huggingface_hub takes too: one writer for a blob. Raises DownloadStopped."""
        folder = self.cache / ".locks" / self._folder_name
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / f"{etag}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while True:
                if stop.is_set():
                    raise DownloadStopped
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    stop.wait(0.2)
            yield
        finally:
            os.close(handle)

    def publish(self, commit: str, revision: str | None, files: Mapping[str, str]) -> Path:
        """Publish the files (name to etag) as one snapshot, in one move, then point its revision at it.

        Files that another program put into that snapshot stay. Before this, the model is not visible.
        """
        final = self.snapshot(commit)
        fresh = final.with_name(f"{_MOVED}{secrets.token_hex(4)}")
        fresh.mkdir(parents=True)
        if final.is_dir():
            shutil.copytree(final, fresh, symlinks=True, dirs_exist_ok=True)
        for name, etag in files.items():
            link = fresh / PurePosixPath(name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            up = "../" * (len(PurePosixPath(name).parts) + 1)
            link.symlink_to(f"{up}blobs/{etag}")
        if final.exists():
            old = final.with_name(f"{_MOVED}{secrets.token_hex(4)}")
            final.rename(old)
            fresh.rename(final)
            shutil.rmtree(old)
        else:
            fresh.rename(final)
        if revision != commit:
            self._name(revision or "main", commit)
        return final

    def _name(self, revision: str, commit: str) -> None:
        reference = self.folder / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        fresh = reference.with_name(f"{_MOVED}{secrets.token_hex(4)}")
        fresh.write_text(commit, "ascii")
        fresh.replace(reference)

    def refs(self) -> dict[str, str]:
        """Return the commit of each branch or tag."""
        root = self.folder / "refs"
        files = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(_MOVED)]
        return {path.relative_to(root).as_posix(): path.read_text("ascii").strip() for path in files}

    def revisions(self) -> tuple[str, ...]:
        folders = self.folder / "snapshots"
        if not folders.is_dir():
            return ()
        return tuple(sorted(path.name for path in folders.iterdir() if not path.name.startswith(_MOVED)))

    def usage(self) -> DiskUsage:
        blobs = self.folder / "blobs"
        size = partial = 0
        for path in blobs.iterdir() if blobs.is_dir() else ():
            count = path.lstat().st_size
            if path.name.endswith(INCOMPLETE):
                partial += count
            else:
                size += count
        return DiskUsage(self.name, self.folder, size, partial, self.revisions())

    def delete(self) -> int:
        """Delete everything of this repository: first out of sight in one move, then the files. Returns the
        bytes freed.
        """
        before = self.usage()
        gone = self.cache / f"{_MOVED}{secrets.token_hex(4)}"
        self.folder.rename(gone)
        shutil.rmtree(gone)
        shutil.rmtree(self.cache / ".locks" / self._folder_name, ignore_errors=True)
        return before.size + before.partial

    def delete_revision(self, commit: str) -> int:
        """Delete one snapshot, and the blobs that no other snapshot links to. Returns the bytes freed."""
        if self.revisions() == (commit,):
            return self.delete()
        for name, target in self.refs().items():
            if target == commit:
                (self.folder / "refs" / name).unlink()
        gone = self.snapshot(commit).with_name(f"{_MOVED}{secrets.token_hex(4)}")
        self.snapshot(commit).rename(gone)
        shutil.rmtree(gone)
        return self._sweep()

    def delete_files(self, links: Sequence[Path]) -> int:
        """Delete these files of snapshots, with the blobs that no other file is; all of the repository if
        nothing but small files is left, and no download. Returns the bytes freed.
        """
        blobs = {link.resolve() for link in links}
        for link in links:
            link.unlink(missing_ok=True)
        used, freed = self._used(), 0
        for blob in blobs:
            if blob.name not in used and blob.parent == (self.folder / "blobs").resolve():
                freed += blob.stat().st_size
                blob.unlink()
        left = (path for commit in self.revisions() for path in self.snapshot(commit).rglob("*"))
        has_weights = any(each.suffix in WEIGHT_SUFFIXES and not is_projector(each.name) for each in left)
        if has_weights or any(path.name not in used for path in (self.folder / "blobs").iterdir()):
            return freed
        return freed + self.delete()

    def drop(self, etags: Iterable[str]) -> int:
        """Delete the files of an abandoned download: its partial files, and blobs that no snapshot uses.
        Returns the bytes freed.
        """
        freed = 0
        used = self._used()
        for etag in etags:
            paths = [self.partial(etag)] + ([] if etag in used else [self.blob(etag)])
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    freed += path.stat().st_size
                    path.unlink()
        if not self.revisions():
            with contextlib.suppress(OSError):  # another program may be writing here: then the folder stays
                for folder in (self.folder / "blobs", self.folder / "snapshots", self.folder):
                    if folder.is_dir():
                        folder.rmdir()
        return freed

    def _used(self) -> set[str]:
        return {
            path.resolve().name
            for commit in self.revisions()
            for path in self.snapshot(commit).rglob("*")
            if path.is_symlink()
        }

    def _sweep(self) -> int:
        used = self._used()
        freed = 0
        blobs = self.folder / "blobs"
        for path in blobs.iterdir() if blobs.is_dir() else ():
            if path.name not in used and not path.name.endswith(INCOMPLETE):
                freed += path.stat().st_size
                path.unlink()
        return freed


def clean_up(cache: Path) -> None:
    """Remove directories that a crash left half moved."""
    if not cache.is_dir():
        return
    for pattern in (f"{_MOVED}*", f"models--*/snapshots/{_MOVED}*", f"models--*/refs/{_MOVED}*"):
        for path in cache.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def repositories(cache: Path) -> list[Repo]:
    if not cache.is_dir():
        return []
    folders = sorted(path for path in cache.glob("models--*--*") if path.is_dir())
    return [Repo(cache, path.name.removeprefix("models--").replace("--", "/", 1)) for path in folders]
