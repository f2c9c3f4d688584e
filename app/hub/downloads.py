"""All downloads of the daemon: started, paused, resumed, cancelled, and carried over its restarts."""

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..catalog import HUB_ID
from ..errors import ApiError
from ..events import Events
from . import errors
from .download import Download, FitCheck, Preparation, State, prepare
from .errors import HubError
from .layout import Repo, clean_up
from .listing import Hub, RepoFile
from .off_loop import in_thread
from .pacing import Retries, Stopped, Valve
from .transfer import Means, Progress, fetch, free_space

log = logging.getLogger("llmbox.hub")

TICK = 1.0
"""Seconds between two events of progress, while something is on its way."""
PATIENCE = 2.0
"""Seconds that whoever cancels waits for files to be gone."""
REMEMBERED = 50
"""Finished downloads kept in the list."""


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


class Downloads:
    """Only to be used from the daemon's event loop."""

    def __init__(self, setup: Setup, events: Events) -> None:
        self._setup = setup
        self._events = events
        self._all: dict[str, Download] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._valve = Valve(setup.bandwidth)
        self._slots = asyncio.Semaphore(setup.files_at_once)
        self._closed = False

    # ------------------------------------------------------------------ what routes call

    def all(self) -> list[Download]:
        """Oldest first."""
        return list(self._all.values())

    def get(self, model: str) -> Download:
        found = self._all.get(model)
        if found is None:
            raise ApiError(404, f"No download of {model!r} is known.", "download_not_found", "model")
        return found

    def start(self, model: str, *, anyway: bool = False) -> Download:
        """Begins, goes on with a paused or failed one, or returns the one under way."""
        found = self._all.get(model)
        if found is not None and (found.active or found.state == "paused"):
            found.anyway |= anyway
            return found if found.active else self._go(found)
        match = HUB_ID.fullmatch(model)
        if match is None or ".." in model or "--" in model:
            raise ApiError(
                400,
                f"{model[:200]!r} is not a model of the hub: it is written org/name or org/name@revision.",
                "invalid_value",
                "model",
            )
        if found is None or found.state != "failed":
            self._all.pop(model, None)
            found = Download(model, match["repo"], match["revision"])
            self._all[model] = found
        found.anyway |= anyway
        return self._go(found)

    def pause(self, model: str) -> Download:
        download = self.get(model)
        if not download.active:
            raise _not_now(download, "paused")
        self._halt(download, "paused")
        return download

    def resume(self, model: str) -> Download:
        download = self.get(model)
        if download.active:
            return download
        if download.state not in {"paused", "failed"}:
            raise _not_now(download, "resumed")
        return self._go(download)

    async def cancel(self, model: str) -> Download:
        """What was fetched is deleted, unless another version of the model uses it.

        Returns before that where a thread still waits for a hub that says nothing.
        """
        download = self.get(model)
        if download.state in {"ready", "cancelled"}:
            raise _not_now(download, "cancelled")
        task = self._tasks.get(model)
        self._halt(download, "cancelled")
        cleaning = asyncio.create_task(self._clean(download, task))
        self._tasks[model] = cleaning  # a new pull of it waits for this one
        await asyncio.wait({cleaning}, timeout=PATIENCE)
        return download

    async def _clean(self, download: Download, earlier: "asyncio.Task[None] | None") -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        repo, etags = self._repo(download), list(download.etags)
        await asyncio.to_thread(_drop, repo, etags)

    def is_open(self, repo: str) -> bool:
        """Whether files of this repository are being written, or kept to go on later."""
        return any(d.repo == repo and (d.active or d.state == "paused") for d in self._all.values())

    def forget(self, repo: str) -> None:
        """Its files are gone."""
        for download in [d for d in self._all.values() if d.repo == repo and not d.active]:
            del self._all[download.model]
        self._save()

    # ------------------------------------------------------------------ the daemon's start and end

    def restore(self) -> None:
        """Goes on with what an earlier daemon did not finish, however it ended."""
        with contextlib.suppress(OSError):
            clean_up(self._setup.cache)
        for row in _read(self._setup.state_file):
            download = Download(row["model"], row["repo"], row["revision"], bool(row["anyway"]))
            download.commit, download.etags = row["commit"], list(row["etags"])
            self._all[download.model] = download
            download.state = "paused"
            if row["state"] in {"checking", "downloading"}:
                log.info("going on with the download of %s", download.model)
                self._go(download)

    async def close(self) -> None:
        """Stops where it is; the next daemon goes on."""
        self._closed = True
        for download in self._all.values():
            download.stop.set()
        tasks = [*self._tasks.values(), *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------ inside

    def _go(self, download: Download) -> Download:
        download.stop = threading.Event()  # threads of before keep theirs, which is set
        download.error, download.message = None, ""
        self._change(download, "checking")
        earlier = self._tasks.get(download.model)
        self._tasks[download.model] = asyncio.create_task(self._run(download, download.stop, earlier))
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick())
        return download

    def _halt(self, download: Download, state: State) -> None:
        download.stop.set()
        download.rate = None
        self._change(download, state)

    async def _run(
        self, download: Download, stop: threading.Event, earlier: "asyncio.Task[None] | None"
    ) -> None:
        if earlier is not None and not earlier.done():
            await asyncio.wait({earlier})
        try:
            await self._fetch(download, stop)
        except Stopped:
            return  # whoever stopped it has said what it is now
        except (HubError, OSError) as error:
            failure = error if isinstance(error, HubError) else errors.of_os_error(error, self._setup.cache)
        except Exception:
            log.exception("the download of %s failed", download.model)
            failure = HubError("internal", f"the download of {download.model} failed", "an internal error")
        else:
            if not stop.is_set():
                self._change(download, "ready")
                self._trim()
            return
        if not stop.is_set():
            stop.set()
            download.error = failure
            log.error("download of %s failed: %s", download.model, failure)
            self._change(download, "failed")

    async def _fetch(self, download: Download, stop: threading.Event) -> None:
        _check_going(stop)
        hub = await in_thread(self._setup.hub, "llmbox-hub")
        repo = self._repo(download)
        found = await in_thread(lambda: self._prepare(hub, repo, download, stop), "llmbox-hub")
        _check_going(stop)
        download.commit = found.listing.commit
        download.files = {file: Progress(file.size) for file in found.files}
        download.etags = [file.etag for file in found.files]
        self._change(download, "downloading")
        loop = asyncio.get_running_loop()

        def note(text: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._note, download, text)

        means = Means(hub.web, repo, stop, self._valve, self._setup.retries, note)
        try:
            async with asyncio.TaskGroup() as group:
                for file, progress in download.files.items():
                    group.create_task(self._fetch_file(means, hub, download, file, progress))
        except BaseExceptionGroup as failures:
            raise _most_telling(failures) from None
        _check_going(stop)
        names = {file.name: file.etag for file in download.files}
        commit, revision = found.listing.commit, download.revision
        await in_thread(lambda: repo.publish(commit, revision, names), "llmbox-hub")

    def _prepare(self, hub: Hub, repo: Repo, download: Download, stop: threading.Event) -> Preparation:
        setup = self._setup
        return prepare(
            hub,
            repo,
            download,
            stop,
            fit=setup.fit,
            free=lambda: setup.free(setup.cache),
            retries=setup.retries,
        )

    async def _fetch_file(
        self, means: Means, hub: Hub, download: Download, file: RepoFile, progress: Progress
    ) -> None:
        assert download.commit is not None
        url = hub.url(download.repo, download.commit, file.name)
        async with self._slots:
            _check_going(means.stop)
            await in_thread(lambda: fetch(means, file, url, progress), f"llmbox-fetch {file.name}")

    def _repo(self, download: Download) -> Repo:
        return Repo(self._setup.cache, download.repo)

    def _note(self, download: Download, text: str) -> None:
        log.warning("download of %s: %s", download.model, text)
        download.message = text
        self._events.publish("download.retry", {"model": download.model, "message": text})

    def _change(self, download: Download, state: State) -> None:
        download.state = state
        log.info("download of %s: %s", download.model, state)
        self._events.publish(f"download.{state}", download.as_dict(with_files=False))
        self._save()

    async def _tick(self) -> None:
        """Ends itself when nothing is on its way: an idle daemon does nothing."""
        before: dict[str, tuple[float, int]] = {}
        while any(download.active for download in self._all.values()):
            for download in self._all.values():
                if not download.active:
                    continue
                now, done = time.monotonic(), download.done
                then, was = before.get(download.model, (now, done))
                if now > then:
                    rate = max(0, done - was) / (now - then)
                    download.rate = (
                        rate if download.rate is None else download.rate + 0.3 * (rate - download.rate)
                    )
                    self._events.publish(
                        "download.progress", download.as_dict(with_files=False), remember=False
                    )
                before[download.model] = (now, done)
            await asyncio.sleep(TICK)

    def _trim(self) -> None:
        ended = [d for d in self._all.values() if d.state in {"ready", "cancelled"}]
        for download in ended[:-REMEMBERED]:
            del self._all[download.model]

    def _save(self) -> None:
        if self._closed:
            return
        rows = [
            {
                "model": d.model,
                "repo": d.repo,
                "revision": d.revision,
                "anyway": d.anyway,
                "commit": d.commit,
                "etags": d.etags,
                "state": d.state,
            }
            for d in self._all.values()
            if d.state not in {"ready", "cancelled"}
        ]
        try:
            _write(self._setup.state_file, rows)
        except OSError as error:
            log.error("cannot note the downloads in %s: %s", self._setup.state_file, error)  # noqa: TRY400


def _check_going(stop: threading.Event) -> None:
    if stop.is_set():
        raise Stopped


def _drop(repo: Repo, etags: list[str]) -> None:
    freed = repo.drop(etags)
    log.info("cancelled download of %s: %d bytes freed", repo.name, freed)


def _most_telling(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """One failure stops the other files: those say nothing new."""
    return next((e for e in failures.exceptions if not isinstance(e, Stopped)), failures.exceptions[0])


def _not_now(download: Download, what: str) -> ApiError:
    return ApiError(
        409, f"The download of {download.model} is {download.state}: it cannot be {what}.", "download_state"
    )


def _read(file: Path) -> list[dict[str, Any]]:
    """Rows of an earlier daemon. A broken file costs the resumption, never the start."""
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_bytes())["downloads"]
        if all(set(row) == _ROW and HUB_ID.fullmatch(row["model"]) for row in rows):
            return rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    log.warning("%s cannot be read: downloads that were under way have to be asked for again", file)
    return []


_ROW = {"model", "repo", "revision", "anyway", "commit", "etags", "state"}


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    if not rows:
        file.unlink(missing_ok=True)
        return
    fresh = file.with_suffix(".new")
    with fresh.open("w") as out:
        json.dump({"schema": 1, "downloads": rows}, out)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(file)
