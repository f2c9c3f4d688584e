"""Transfer of one file from the hub to its blob: resumed by range, checked, in place only when its hash is
right. Retries and the bandwidth cap.
"""

import hashlib
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from . import errors
from .cache_layout import Repo
from .errors import DownloadStopped, HubError
from .http import HubHttpClient, HubResponse
from .repo_files import RepoFile

CHUNK = 256 * 1024
VERIFY_CHUNK = 4 * 1024 * 1024
ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class TransferProgress:
    """Progress of one file, written by its thread, read by any."""

    size: int
    done: int = 0
    retries: int = 0
    state: str = "waiting"
    """One of waiting, checking, fetching, done."""


class RateLimiter:
    """Bandwidth cap in bytes a second over all threads that share it. The bound may change at any time."""

    def __init__(self, rate: Callable[[], float | None]) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> float:
        """Return the seconds to wait before these bytes are within the bound."""
        rate = self._rate()
        if not rate:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + count / rate
            return self._free_at - now


@dataclass(frozen=True, slots=True)
class Retries:
    """Tries in a row without a byte of progress, and the first wait in seconds, which doubles."""

    tries: int = 8
    first: float = 0.5
    longest: float = 30.0

    def wait(self, failures: int, asked: float | None) -> float:
        """Return the seconds to wait before the next try, after so many failures in a row. A wait that the
        server asks for is respected.
        """
        if asked is not None:
            return asked
        bound: float = min(self.longest, self.first * 2 ** (failures - 1))
        return bound * random.uniform(0.5, 1.0)  # noqa: S311 - spreads clients out, protects nothing


@dataclass(frozen=True, slots=True)
class TransferContext:
    """Dependencies of a transfer."""

    web: HubHttpClient
    repo: Repo
    stop: threading.Event
    valve: RateLimiter
    retries: Retries = field(default_factory=Retries)
    note: Callable[[str], None] = lambda _: None
    """Callback for every failed try, called from the transfer's thread."""


def fetch(means: TransferContext, file: RepoFile, url: str, progress: TransferProgress) -> None:
    """Fetch a file. Returns when the blob is there and its hash is right. Raises HubError or Stopped."""
    repo = means.repo
    with repo.locked(file.etag, means.stop):
        blob, partial = repo.blob(file.etag), repo.partial(file.etag)
        blob.parent.mkdir(parents=True, exist_ok=True)
        try:
            if blob.is_file() and _is_whole(blob, file, means, progress):
                progress.done, progress.state = file.size, "done"
                return
            _fetch_checked(means, file, url, partial, progress)
            partial.replace(blob)
            _sync_folder(blob.parent)
        except OSError as error:
            raise errors.of_os_error(
                error, repo.cache, file.size - progress.done, free_space(repo.cache)
            ) from error
    progress.state = "done"


def new_hash(file: RepoFile) -> Hasher:
    """Return the hash of a file: sha256 for large files, git's sha1 for small ones, which counts a header
    with the size.
    """
    if file.by_sha256:
        return hashlib.sha256()
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(b"blob %d\0" % file.size)
    return digest


def _is_whole(blob: Path, file: RepoFile, means: TransferContext, progress: TransferProgress) -> bool:
    """Check a blob that is there already, and delete a wrong one."""
    digest = new_hash(file)
    if blob.stat().st_size == file.size:
        _hash_file(blob, digest, means.stop, progress)
        if digest.hexdigest() == file.etag:
            return True
    means.note(f"{file.name} on disk differs from the hub's file: deleted, fetched again")
    blob.unlink()
    progress.done = 0
    return False


def _fetch_checked(
    means: TransferContext, file: RepoFile, url: str, partial: Path, progress: TransferProgress
) -> None:
    """Fetch and check the hash. A wrong hash deletes the bytes and tries once more."""
    for attempt in (1, 2):
        digest = _fetch_whole(means, file, url, partial, progress)
        if digest.hexdigest() == file.etag:
            return
        partial.unlink()
        progress.done = 0
        progress.retries += 1
        means.note(f"{file.name}: wrong hash (try {attempt} of 2), deleted")
    raise HubError(
        "integrity",
        f"{file.name} arrived damaged twice",
        f"its hash is not {file.etag}; it was deleted",
        "pull again; if it happens again, something between this machine and the hub changes the data",
    )


def _fetch_whole(
    means: TransferContext, file: RepoFile, url: str, partial: Path, progress: TransferProgress
) -> Hasher:
    """Retry until every byte is on disk. Only failures in a row without a new byte count."""
    failures = 0
    digest = new_hash(file)
    with partial.open("ab") as out:
        if out.tell() > file.size:
            out.truncate(0)
        progress.done = 0
        _hash_file(partial, digest, means.stop, progress)
        while progress.done < file.size:
            before = progress.done
            progress.state = "fetching"
            try:
                digest = _stream(means, file, url, out, digest, progress)
            except HubError as error:
                if means.stop.is_set():  # the connection was cut
                    raise DownloadStopped from None
                failures = 1 if progress.done > before else failures + 1
                if not error.retry or failures >= means.retries.tries:
                    raise
                progress.retries += 1
                wait = means.retries.wait(failures, error.retry_after)
                means.note(f"{file.name}: {error}; next try in {wait:.1f} s")
                if means.stop.wait(wait):
                    raise DownloadStopped from None
        out.flush()
        os.fsync(out.fileno())
    return digest


def _stream(
    means: TransferContext,
    file: RepoFile,
    url: str,
    out: BinaryIO,
    digest: Hasher,
    progress: TransferProgress,
) -> Hasher:
    """Write the bytes of one answer. A server that knows no ranges begins again: then so does the hash."""
    with means.web.get(url, means.repo.name, start=progress.done) as answer:
        _check_answer(answer, file)
        if answer.start != progress.done:
            if answer.start != 0:
                raise _broken_off(file, "the server sent another range than requested")
            out.truncate(0)
            progress.done, digest = 0, new_hash(file)
        while progress.done < file.size:
            if means.stop.is_set():
                raise DownloadStopped
            data = answer.body.read1(min(CHUNK, file.size - progress.done))
            if not data:
                raise _broken_off(file, f"{progress.done} of {file.size} bytes arrived")
            _write(out, data, means, file.size - progress.done)
            digest.update(data)
            progress.done += len(data)
            if (wait := means.valve.take(len(data))) and means.stop.wait(wait):
                raise DownloadStopped
    return digest


def _write(out: BinaryIO, data: bytes, means: TransferContext, missing: int) -> None:
    """Write bytes. A full disk must not look like a lost connection, which would be tried again."""
    try:
        out.write(data)
    except OSError as error:
        cache = means.repo.cache
        raise errors.of_os_error(error, cache, missing, free_space(cache)) from error


def _check_answer(answer: HubResponse, file: RepoFile) -> None:
    """Check, before a byte is kept, that the answer is the content that was listed."""
    if answer.total is not None and answer.start == 0 and answer.total != file.size:
        raise _broken_off(file, f"{answer.total} bytes are offered, {file.size} were listed")
    # An etag of another kind (md5 of some mirror) says nothing; the hash of the bytes decides.
    same_kind = answer.etag is not None and ETAG.fullmatch(answer.etag) and len(answer.etag) == len(file.etag)
    if same_kind and answer.etag != file.etag:
        raise _broken_off(file, "the hub now offers other content than it listed")


def _broken_off(file: RepoFile, why: str) -> HubError:
    return HubError(
        "hub_error",
        f"{file.name} did not arrive whole",
        why,
        "pull again: downloaded bytes are kept",
        retry=True,
    )


def _hash_file(path: Path, digest: Hasher, stop: threading.Event, progress: TransferProgress) -> None:
    """Hash bytes that are on disk already. They count as done once they are read again."""
    with path.open("rb") as source:
        while data := source.read(VERIFY_CHUNK):
            if stop.is_set():
                raise DownloadStopped
            progress.state = "checking"
            digest.update(data)
            progress.done += len(data)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_space(place: Path) -> int:
    """Return the bytes that this user may still write at a place, or where it is to be made."""
    while not place.exists():
        place = place.parent
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize
