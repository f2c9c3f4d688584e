"""Download queue of the daemon: start, pause, resume, cancel, and restore after a restart."""

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ApiError
from ..events import Events
from ..models.catalog import HUB_ID, likely_id
from ..models.registry import full_name, short_names
from ..util.formatting import did_you_mean
from . import errors
from .cache_layout import Repo, clean_up
from .download import Download, DownloadSettings, State, TransferLimits
from .errors import DownloadStopped, HubError

log = logging.getLogger("llmbox.hub")

_FIRST = ("model", "repo", "revision", "anyway", "commit", "etags", "state")
_FIELDS = (*_FIRST, "message", "started_at", "ended_at")
_ROW, _ROW_1 = {*_FIELDS, "error"}, set(_FIRST)
"""JSON fields of a row: today's, and those of schema 1, which had no reasons and times."""
_ERROR = ("code", "what", "why", "fix")


def read_kept(file: Path) -> list[tuple[Download, bool]]:
    """Read the downloads of an earlier daemon, paused or failed as they were, and whether each was under way.

    A broken file costs the resumption, never the start.
    """
    found = []
    for row in _rows(file):
        state: State = "failed" if row["state"] == "failed" else "paused"
        download = Download(row["model"], row["repo"], row["revision"], bool(row["anyway"]), state=state)
        download.commit, download.etags = row["commit"], list(row["etags"])
        if set(row) == _ROW:
            download.message = row["message"]
            download.started_at, download.ended_at = row["started_at"], row["ended_at"]
            download.error = HubError(**row["error"]) if row["error"] else None
        if state == "failed" and download.error is None:
            download.error = HubError("internal", f"the download of {download.model} failed", "see the log")
        found.append((download, row["state"] in {"checking", "downloading"}))
    return found


def write_kept(file: Path, downloads: Iterable[Download]) -> None:
    """Write unfinished downloads; without any the file is deleted. Raises OSError.

    It is written on the event loop, so nothing waits for the disk, which a download keeps busy: a power cut
    may lose the newest state.
    """
    rows = [_row(each) for each in downloads if each.state not in {"ready", "cancelled"}]
    if not rows:
        file.unlink(missing_ok=True)
        return
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"schema": 2, "downloads": rows}))
    fresh.replace(file)


def _row(download: Download) -> dict[str, Any]:
    error = download.error
    row = {name: getattr(download, name) for name in _FIELDS}
    return row | {"error": None if error is None else {name: getattr(error, name) for name in _ERROR}}


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_bytes())["downloads"]
        if all(_is_sound(row) for row in rows):
            return rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    log.warning("%s cannot be read: running downloads have to be started again", file)
    return []


def _is_sound(row: Mapping[str, Any]) -> bool:
    error, times = row.get("error"), (row.get("started_at", 0.0), row.get("ended_at"))
    texts = [row.get("message", ""), *(error.values() if error else ())]
    return (
        set(row) in (_ROW, _ROW_1)
        and HUB_ID.fullmatch(row["model"]) is not None
        and (error is None or set(error) == set(_ERROR))
        and all(isinstance(text, str) for text in texts)
        and all(each is None or isinstance(each, int | float) for each in times)
    )


TICK = 1.0
"""Seconds between two progress events, while a download is under way."""
PATIENCE = 2.0
"""Seconds that a cancellation waits for the files to be deleted."""
REMEMBERED = 50
"""Finished downloads kept in the list."""
FORGET_S = 3600.0
"""Seconds after which a failed download that fetched nothing, as of a name that does not exist, leaves the
list.
"""


class Downloads:
    """All downloads. Only to be used from the daemon's event loop."""

    def __init__(self, setup: DownloadSettings, events: Events) -> None:
        self._setup = setup
        self._events = events
        self._all: dict[str, Download] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._fetching = TransferLimits(setup, self._change, self._note)
        self._closed = False

    # ------------------------------------------------------------------ methods for routes

    def all(self) -> list[Download]:
        """Return all downloads, oldest first."""
        self._drop_empty_failures()
        return list(self._all.values())

    def get(self, model: str) -> Download:
        found = self._all.get(full_name(model))
        if found is None:
            raise ApiError(404, f"No download of {model!r} is known.", "download_not_found", "model")
        return found

    def start(self, model: str, *, anyway: bool = False) -> Download:
        """Start a download, resume a paused or failed one, or return the one under way."""
        model = full_name(model)
        found = self._all.get(model)
        if found is not None and (found.active or found.state == "paused"):
            found.anyway |= anyway
            return found if found.active else self._go(found)
        match = HUB_ID.fullmatch(model)
        if match is None:
            raise ApiError(
                400,
                f"{model[:200]!r} is not a model of the hub: it is org/name, org/name@revision or, of "
                "GGUF files, org/name:Q4_K_M" + (f"; {hint.strip()}" if (hint := _meant(model)) else "."),
                "invalid_value",
                "model",
            )
        if found is None or found.state != "failed":
            self._all.pop(model, None)
            found = Download(model, match["repo"], match["revision"])
            self._all[model] = found
        found.anyway |= anyway
        return self._go(found)

    async def follow(self, download: Download) -> AsyncGenerator[Download, None]:
        """Yield the download each second while it is under way, and once more when it has ended."""
        while download.active and not self._closed:
            yield download
            await asyncio.wait({self._tasks[download.model]}, timeout=TICK)
        yield download

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
        """Cancel a download and delete what was fetched, unless another version of the model uses it.

        Returns before the deletion where a thread cannot be ended soon: one that still connects.
        """
        download = self.get(model)
        if download.state in {"ready", "cancelled"}:
            raise _not_now(download, "cancelled")
        task = self._tasks.get(download.model)
        self._halt(download, "cancelled")
        cleaning = asyncio.create_task(self._clean(download, task))
        self._tasks[download.model] = cleaning  # a new pull of it waits for this one
        await asyncio.wait({cleaning}, timeout=PATIENCE)
        return download

    async def dismiss(self, model: str) -> Download:
        """Take an ended download off the list. Files that a failed download fetched are deleted."""
        download = self.get(model)
        if download.active or download.state == "paused":
            raise _not_now(download, "dismissed")
        if download.state == "failed":
            await self.cancel(model)
        self._all.pop(download.model, None)
        self._save()
        self._events.publish("download.dismissed", {"model": download.model})
        return download

    def _drop_empty_failures(self) -> None:
        oldest = time.time() - FORGET_S
        for download in list(self._all.values()):
            ended = download.ended_at or download.started_at
            if download.state == "failed" and not download.etags and ended < oldest:
                log.info("the failed download of %s is forgotten: nothing was fetched", download.model)
                del self._all[download.model]

    async def _clean(self, download: Download, earlier: "asyncio.Task[None] | None") -> None:
        await _wait_until_ended(download, earlier)
        repo, etags = self._fetching.repo(download), list(download.etags)
        await asyncio.to_thread(_drop, repo, etags)

    def is_open(self, repo: str) -> bool:
        """Return True if files of this repository are being written, or kept to resume later."""
        return any(d.repo == repo and (d.active or d.state == "paused") for d in self._all.values())

    def forget(self, repo: str) -> None:
        """Drop the downloads of a repository whose files are gone."""
        for download in [d for d in self._all.values() if d.repo == repo and not d.active]:
            del self._all[download.model]
        self._save()

    # ------------------------------------------------------------------ start and end of the daemon

    def restore(self) -> None:
        """Resume downloads that an earlier daemon did not finish, however it ended."""
        with contextlib.suppress(OSError):
            clean_up(self._setup.cache)
        for download, under_way in read_kept(self._setup.state_file):
            self._all[download.model] = download
            if under_way:
                log.info("resuming the download of %s", download.model)
                self._go(download)

    async def close(self) -> None:
        """Stop all downloads where they are; the next daemon resumes them."""
        self._closed = True
        for download in self._all.values():
            _stop(download)
        tasks = [*self._tasks.values(), *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------ inside

    def _go(self, download: Download) -> Download:
        download.stop = threading.Event()  # earlier threads keep their event, which is set
        download.cut = _nothing
        download.error, download.message, download.ended_at = None, "", None
        self._change(download, "checking")
        earlier = self._tasks.get(download.model)
        self._tasks[download.model] = asyncio.create_task(self._run(download, download.stop, earlier))
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick())
        return download

    def _halt(self, download: Download, state: State) -> None:
        _stop(download)
        download.rate = None
        self._change(download, state)

    async def _run(
        self, download: Download, stop: threading.Event, earlier: "asyncio.Task[None] | None"
    ) -> None:
        await _wait_until_ended(download, earlier)
        try:
            await self._fetching.fetch(download, stop)
        except DownloadStopped:
            return  # the caller that stopped it has set the state
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
            _stop(download)
            download.error, download.ended_at = failure, time.time()
            log.error("download of %s failed: %s", download.model, failure)
            self._change(download, "failed")

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
        """Report progress each second. Ends itself when no download is under way: an idle daemon does
        nothing.
        """
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
                    event = download.as_dict(with_files=False)
                    self._events.publish("download.progress", event, remember=False)
                before[download.model] = (now, done)
            await asyncio.sleep(TICK)

    def _trim(self) -> None:
        ended = [d for d in self._all.values() if d.state in {"ready", "cancelled"}]
        for download in ended[:-REMEMBERED]:
            del self._all[download.model]

    def _save(self) -> None:
        if self._closed:
            return
        try:
            write_kept(self._setup.state_file, self._all.values())
        except OSError as error:
            log.error("cannot note the downloads in %s: %s", self._setup.state_file, error)  # noqa: TRY400


def _nothing() -> None:
    """Do nothing: default of a download that has no connection to abort yet."""


def _stop(download: Download) -> None:
    """Stop a download. Its threads end at once, also those that wait for a silent hub."""
    download.stop.set()
    download.cut()


async def _wait_until_ended(download: Download, task: "asyncio.Task[None] | None") -> None:
    """Wait for an earlier run to end, threads included: both write into the same files."""
    if task is not None and not task.done():
        await asyncio.wait({task})
    if download.works:
        await asyncio.wait(set(download.works))


def _drop(repo: Repo, etags: list[str]) -> None:
    freed = repo.drop(etags)
    log.info("cancelled download of %s: %d bytes freed", repo.name, freed)


def _not_now(download: Download, what: str) -> ApiError:
    return ApiError(
        409, f"The download of {download.model} is {download.state}: it cannot be {what}.", "download_state"
    )


def _meant(text: str) -> str:
    return likely_id(text) or did_you_mean(text[:100], short_names())
