"""One download from its first look at the hub to its snapshot: waits on the loop, works in threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .download import Download, FitCheck, Preparation, State, prepare
from .layout import Repo
from .listing import Hub, RepoFile
from .off_loop import in_thread
from .pacing import Retries, Stopped, Valve
from .transfer import Means, Progress, fetch, free_space


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What downloads depend on. Functions are asked again each time, so settings may change."""

    cache: Path
    state_file: Path
    fit: FitCheck
    bandwidth: Callable[[], float | None] = lambda: None
    """Bytes a second, or no bound."""
    files_at_once: int = 4
    hub: Callable[[], Hub] = Hub.of_environment
    """Called in a thread."""
    free: Callable[[Path], int] = free_space
    retries: Retries = field(default_factory=Retries)


class Fetching:
    """Shared by all downloads: the bounds on files at once and on bytes a second count over them together."""

    def __init__(
        self, setup: Setup, change: Callable[[Download, State], None], note: Callable[[Download, str], None]
    ) -> None:
        """`change` and `note` are called on the loop: a new state, and a failed try."""
        self._setup = setup
        self._change = change
        self._note = note
        self._valve = Valve(setup.bandwidth)
        self._slots = asyncio.Semaphore(setup.files_at_once)

    async def fetch(self, download: Download, stop: threading.Event) -> None:
        """Returns when the model can be found in the cache. Raises Stopped, HubError, OSError."""
        _check_going(stop)
        hub, found = await self._look(download, stop)
        _check_going(stop)
        download.commit = found.listing.commit
        download.files = {file: Progress(file.size) for file in found.files}
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

    async def _look(self, download: Download, stop: threading.Event) -> tuple[Hub, Preparation]:
        """A thread that waits for a listing is left to itself when the download stops: it writes nothing."""
        setup, repo = self._setup, self.repo(download)
        note = self._noting(download)

        def look() -> tuple[Hub, Preparation]:
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
        download.cut = lambda: None if looking.done() else looking.set_exception(Stopped())
        hub, found = await looking
        download.cut = hub.web.cut
        return hub, found

    def _noting(self, download: Download) -> Callable[[str], None]:
        """For threads."""
        loop = asyncio.get_running_loop()

        def note(text: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._note, download, text)

        return note

    async def _fetch_files(self, hub: Hub, download: Download, stop: threading.Event) -> None:
        note = self._noting(download)
        means = Means(hub.web, self.repo(download), stop, self._valve, self._setup.retries, note)
        try:
            async with asyncio.TaskGroup() as group:
                for file, progress in download.files.items():
                    group.create_task(self._fetch_file(means, hub, download, file, progress))
        except BaseExceptionGroup as failures:
            raise _most_telling(failures) from None

    async def _fetch_file(
        self, means: Means, hub: Hub, download: Download, file: RepoFile, progress: Progress
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
    """Nobody may wait for it any more."""
    if not work.cancelled():
        work.exception()


def _check_going(stop: threading.Event) -> None:
    if stop.is_set():
        raise Stopped


def _most_telling(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """One failure stops the other files: those say nothing new."""
    return next((e for e in failures.exceptions if not isinstance(e, Stopped)), failures.exceptions[0])
