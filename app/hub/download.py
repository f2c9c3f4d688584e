"""One model on its way to this disk: its state, and the steps that a thread takes for it."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from . import errors
from .errors import HubError
from .facts import remote_config
from .fit import DISK_RESERVE
from .layout import Repo
from .listing import Hub, Listing, RepoFile
from .pacing import Retries, Stopped
from .transfer import Progress

T = TypeVar("T")
State = Literal["checking", "downloading", "paused", "ready", "failed", "cancelled"]

FitCheck = Callable[[Any], str]
"""From a ModelConfig to why it does not fit; empty when it does."""


@dataclass(slots=True, eq=False)
class Download:
    """Owned by `Downloads`, on the loop. `stop` and `Progress` objects are shared with threads."""

    model: str
    """As it was asked for: `org/name` or `org/name@revision`."""
    repo: str
    revision: str | None
    anyway: bool = False
    """Fetched although it does not fit or cannot be served."""
    state: State = "checking"
    commit: str | None = None
    """Fixed by the first look: a download that goes on later gets the same files."""
    error: HubError | None = None
    files: dict[RepoFile, Progress] = field(default_factory=dict)
    etags: list[str] = field(default_factory=list)
    """Of `files`, known even after a restart."""
    stop: threading.Event = field(default_factory=threading.Event)
    cut: Callable[[], None] = lambda: None
    """Ends what waits for the hub, once `stop` is set."""
    works: "set[asyncio.Future[None]]" = field(default_factory=set)
    """Threads that fetch its files, until they have ended."""
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    """When it failed, Unix seconds."""
    message: str = ""
    """The last thing that went wrong and was overcome."""
    rate: float | None = None
    """Bytes a second, over the last seconds."""

    @property
    def active(self) -> bool:
        return self.state in {"checking", "downloading"}

    @property
    def total(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def done(self) -> int:
        return sum(progress.done for progress in self.files.values())

    def as_dict(self, *, with_files: bool = True) -> dict[str, Any]:
        left = self.total - self.done
        told: dict[str, Any] = {
            "model": self.model,
            "state": self.state,
            "commit": self.commit,
            "done": self.done,
            "total": self.total,
            "rate": None if self.rate is None else round(self.rate),
            "eta_s": round(left / self.rate, 1) if self.rate and self.active else None,
            "retries": sum(progress.retries for progress in self.files.values()),
            "message": self.message,
            "started_at": self.started_at,
            "error": None if self.error is None else error_dict(self.error),
        }
        if with_files:
            told["files"] = [
                {"name": file.name, "size": file.size, "done": progress.done, "state": progress.state}
                for file, progress in self.files.items()
            ]
        return told


def error_dict(error: HubError) -> dict[str, Any]:
    return {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix, "exit": error.exit}


@dataclass(frozen=True, slots=True)
class Preparation:
    """What the first look found."""

    listing: Listing
    files: tuple[RepoFile, ...]


def prepare(
    hub: Hub,
    repo: Repo,
    download: Download,
    stop: threading.Event,
    *,
    fit: FitCheck,
    free: Callable[[], int],
    retries: Retries,
    note: Callable[[str], None],
) -> Preparation:
    """Looks before a byte is fetched: does it exist, can it be served, does it fit, is there disk for it?

    `note` hears of failed tries. A download that had begun earlier outlasts a network that is down.
    """
    hub.note = note
    has_begun = bool(download.etags)
    listing, files = stubbornly(lambda: _look(hub, download), stop, retries, note, outlasts=has_begun)
    if not download.anyway:
        _check_fit(hub, listing, download, fit)
    need = sum(max(0, file.size - _present(repo, file)) for file in files)
    have = free()
    if need and need + DISK_RESERVE > have:
        raise errors.disk_full(repo.cache, need + DISK_RESERVE, have)
    return Preparation(listing, tuple(files))


def stubbornly(
    work: Callable[[], T],
    stop: threading.Event,
    retries: Retries,
    note: Callable[[str], None],
    *,
    outlasts: bool,
) -> T:
    """`outlasts`: tries again also where nothing is to be expected of the network for now."""
    failures = 0
    while True:
        try:
            return work()
        except HubError as error:
            if stop.is_set():
                raise Stopped from None
            failures += 1
            if not error.retry or failures >= retries.tries or (error.is_definite and not outlasts):
                raise
            wait = retries.wait(failures, error.retry_after)
            note(f"{error}; next try in {wait:.1f} s ({failures + 1} of {retries.tries})")
            if stop.wait(wait):
                raise Stopped from None


def _look(hub: Hub, download: Download) -> tuple[Listing, list[RepoFile]]:
    listing = hub.list_files(download.repo, download.commit or download.revision)
    return listing, hub.needed_files(listing)


def _check_fit(hub: Hub, listing: Listing, download: Download, fit: FitCheck) -> None:
    reason = fit(remote_config(hub, listing))
    if reason:
        raise HubError(
            "does_not_fit",
            f"{download.model} does not fit on this machine",
            reason,
            f"llmbox fit {download.model} tells more; with --anyway it is fetched all the same",
        )


def _present(repo: Repo, file: RepoFile) -> int:
    for path in (repo.blob(file.etag), repo.partial(file.etag)):
        if path.is_file():
            return path.stat().st_size
    return 0
