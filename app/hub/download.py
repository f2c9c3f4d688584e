"""Download of one model: its state, and the steps that a thread takes for it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmbox.engine.model_config.draft_heads import is_draft_head

from ..fit.fit import DISK_RESERVE
from ..models.catalog import HUB_ID
from ..util.threads import in_thread
from . import errors
from .cache_layout import Repo
from .errors import DownloadStopped, HubError
from .model_info import remote_config
from .repo_files import CONFIG_LIMIT, Hub, RepoFile, RepoListing
from .transfer import RateLimiter, Retries, TransferContext, TransferProgress, fetch, free_space

T = TypeVar("T")
State = Literal["checking", "downloading", "paused", "ready", "failed", "cancelled"]

FitCheck = Callable[[Any], str]
"""Function from a ModelConfig to the reason why it does not fit; empty when it does."""


@dataclass(slots=True, eq=False)
class Download:
    """State of one download, owned by `Downloads` on the event loop. `stop` and `TransferProgress` objects
    are shared with threads.
    """

    model: str
    """Name as it was requested: `org/name` or `org/name@revision`."""
    repo: str
    revision: str | None
    anyway: bool = False
    """Fetch the model although it does not fit or cannot be served."""
    state: State = "checking"
    commit: str | None = None
    """Commit, fixed when the repository is first listed: a resumed download gets the same files."""
    error: HubError | None = None
    files: dict[RepoFile, TransferProgress] = field(default_factory=dict)
    etags: list[str] = field(default_factory=list)
    """Etags of `files`, known even after a restart."""
    stop: threading.Event = field(default_factory=threading.Event)
    cut: Callable[[], None] = lambda: None
    """Function that aborts reads from the hub, once `stop` is set."""
    works: "set[asyncio.Future[None]]" = field(default_factory=set)
    """Threads that fetch its files, until they have ended."""
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    """Time of the failure, Unix seconds."""
    message: str = ""
    """Last failure that a retry overcame."""
    rate: float | None = None
    """Bytes a second, averaged over the last seconds."""

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
        data: dict[str, Any] = {
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
            data["files"] = [
                {"name": file.name, "size": file.size, "done": progress.done, "state": progress.state}
                for file, progress in self.files.items()
            ]
        return data


def error_dict(error: HubError) -> dict[str, Any]:
    return {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix, "exit": error.exit}


@dataclass(frozen=True, slots=True)
class DownloadChecks:
    """Result of the checks before the first byte is fetched."""

    listing: RepoListing
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
) -> DownloadChecks:
    """Check before a byte is fetched that the model exists, can be served, and fits in memory and on the
    disk.

    `note` receives failed tries. A download that had begun earlier outlasts a network that is down.
    """
    hub.note = note
    has_begun = bool(download.etags)
    listing, files = with_retries(lambda: _look(hub, download), stop, retries, note, outlasts=has_begun)
    if not download.anyway:
        _check_fit(hub, listing, download, fit)
    need = sum(max(0, file.size - _present(repo, file)) for file in files)
    have = free()
    if need and need + DISK_RESERVE > have:
        raise errors.disk_full(repo.cache, need + DISK_RESERVE, have)
    return DownloadChecks(listing, tuple(files))


def with_retries(
    work: Callable[[], T],
    stop: threading.Event,
    retries: Retries,
    note: Callable[[str], None],
    *,
    outlasts: bool,
) -> T:
    """Retry `work`. `outlasts`: retry also while the network is down."""
    failures = 0
    while True:
        try:
            return work()
        except HubError as error:
            if stop.is_set():
                raise DownloadStopped from None
            failures += 1
            if not error.retry or failures >= retries.tries or (error.is_definite and not outlasts):
                raise
            wait = retries.wait(failures, error.retry_after)
            note(f"{error}; next try in {wait:.1f} s ({failures + 1} of {retries.tries})")
            if stop.wait(wait):
                raise DownloadStopped from None


def _look(hub: Hub, download: Download) -> tuple[RepoListing, list[RepoFile]]:
    match = HUB_ID.fullmatch(download.model)
    quantization = None if match is None else match["quantization"]
    listing = hub.list_files(download.repo, download.commit or download.revision, quantization)
    return listing, hub.needed_files(listing)


def _check_fit(hub: Hub, listing: RepoListing, download: Download, fit: FitCheck) -> None:
    try:
        reason = fit(remote_config(hub, listing))
    except HubError:
        if is_draft_head(hub.read_json(listing, "config.json", CONFIG_LIMIT) or {}):
            return  # small, and planned with its model
        raise
    if reason:
        raise HubError(
            "does_not_fit",
            f"{download.model} does not fit on this machine",
            reason,
            f"llmbox fit {download.model} says more; --anyway downloads it",
        )


def _present(repo: Repo, file: RepoFile) -> int:
    for path in (repo.blob(file.etag), repo.partial(file.etag)):
        if path.is_file():
            return path.stat().st_size
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSettings:
    """Dependencies of downloads. Functions are called anew each time, so settings may change."""

    cache: Path
    state_file: Path
    fit: FitCheck
    bandwidth: Callable[[], float | None] = lambda: None
    """Function that returns the cap in bytes a second, or no bound."""
    files_at_once: int = 4
    hub: Callable[[], Hub] = Hub.of_environment
    """Function that creates the hub's client. It is called in a thread."""
    free: Callable[[Path], int] = free_space
    retries: Retries = field(default_factory=Retries)


class TransferLimits:
    """Fetching of files, shared by all downloads: the bounds on concurrent files and on bytes a second count
    over them together.
    """

    def __init__(
        self,
        setup: DownloadSettings,
        change: Callable[[Download, State], None],
        note: Callable[[Download, str], None],
    ) -> None:
        """Create the shared state. `change` and `note` are called on the event loop, for a new state and for
        a failed try.
        """
        self._setup = setup
        self._change = change
        self._note = note
        self._valve = RateLimiter(setup.bandwidth)
        self._slots = asyncio.Semaphore(setup.files_at_once)

    async def fetch(self, download: Download, stop: threading.Event) -> None:
        """Fetch a model. Returns when it can be found in the cache. Raises Stopped, HubError, OSError."""
        _check_going(stop)
        hub, found = await self._look(download, stop)
        _check_going(stop)
        download.commit = found.listing.commit
        download.files = {file: TransferProgress(file.size) for file in found.files}
        download.etags = [file.etag for file in found.files]
        self._change(download, "downloading")
        await self._fetch_files(hub, download, stop)
        _check_going(stop)
        repo = self.repo(download)
        names = {file.name: file.etag for file in download.files}
        commit, revision = found.listing.commit, download.revision
        await in_thread(lambda: repo.publish(commit, revision, names), "llmbox-hub")

    def repo(self, download: Download) -> Repo:
        return Repo(self._setup.cache, download.repo)

    async def _look(self, download: Download, stop: threading.Event) -> tuple[Hub, DownloadChecks]:
        """Prepare in a thread. A thread that waits for a listing is abandoned when the download stops: it
        writes nothing.
        """
        setup, repo = self._setup, self.repo(download)
        note = self._thread_safe_note(download)

        def look() -> tuple[Hub, DownloadChecks]:
            hub = setup.hub()
            return hub, prepare(
                hub,
                repo,
                download,
                stop,
                fit=setup.fit,
                free=lambda: setup.free(setup.cache),
                retries=setup.retries,
                note=note,
            )

        looking = in_thread(look, "llmbox-hub")
        download.cut = lambda: None if looking.done() else looking.set_exception(DownloadStopped())
        hub, found = await looking
        download.cut = hub.web.cut
        return hub, found

    def _thread_safe_note(self, download: Download) -> Callable[[str], None]:
        """Return a `note` callback for threads."""
        loop = asyncio.get_running_loop()

        def note(text: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._note, download, text)

        return note

    async def _fetch_files(self, hub: Hub, download: Download, stop: threading.Event) -> None:
        note = self._thread_safe_note(download)
        means = TransferContext(hub.web, self.repo(download), stop, self._valve, self._setup.retries, note)
        try:
            async with asyncio.TaskGroup() as group:
                for file, progress in download.files.items():
                    group.create_task(self._fetch_file(means, hub, download, file, progress))
        except BaseExceptionGroup as failures:
            raise _most_telling(failures) from None

    async def _fetch_file(
        self, means: TransferContext, hub: Hub, download: Download, file: RepoFile, progress: TransferProgress
    ) -> None:
        assert download.commit is not None
        url = hub.url(download.repo, download.commit, file.name)
        async with self._slots:
            _check_going(means.stop)
            work = in_thread(lambda: fetch(means, file, url, progress), f"llmbox-fetch {file.name}")
            download.works.add(work)
            work.add_done_callback(download.works.discard)
            work.add_done_callback(_retrieve)
            await asyncio.shield(work)  # another file's failure ends the waiting, not the thread


def _retrieve(work: "asyncio.Future[None]") -> None:
    """Retrieve the task's exception, because nothing may await it."""
    if not work.cancelled():
        work.exception()


def _check_going(stop: threading.Event) -> None:
    if stop.is_set():
        raise DownloadStopped


def _most_telling(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that stopped the other files, whose own errors say nothing new."""
    return next(
        (e for e in failures.exceptions if not isinstance(e, DownloadStopped)), failures.exceptions[0]
    )
