"""Download of a LoRA adapter: the two files that PEFT saves, of a repository of the hub."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llmbox.engine.checkpoint.adapter import CONFIG, WEIGHTS

from ..errors import CliError
from ..fit.fit import DISK_RESERVE
from ..models.catalog import HUB_ID, hub_cache
from . import errors
from .cache_layout import Repo
from .download import with_retries
from .errors import DownloadStopped, HubError
from .repo_files import CONFIG_LIMIT, Hub, RepoFile, RepoListing
from .transfer import RateLimiter, Retries, TransferContext, TransferProgress, fetch, free_space

FILES: Final = (CONFIG, WEIGHTS)
PICKLE: Final = "adapter_model.bin"
Report = Callable[[int, int], None]
"""Function that gets the bytes that are here and those of both files."""


@dataclass(slots=True, eq=False)
class AdapterFetch:
    """Adapter on its way from the hub, as lists show it."""

    name: str
    source: str
    stop: threading.Event = field(default_factory=threading.Event)
    done: int = 0
    total: int = 0
    """Bytes of both files; 0 until the hub has said it."""
    message: str = ""
    """Last trouble that did not end it."""
    is_here: bool = False
    """Both files are here, and are checked against the base."""

    def report(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def note(self, message: str) -> None:
        self.message = message


def download_adapter(
    name: str,
    environ: Mapping[str, str],
    *,
    stop: threading.Event,
    report: Report = lambda _done, _total: None,
    note: Callable[[str], None] = lambda _: None,
    check: Callable[[Mapping[str, object]], object] = lambda _: None,
    rate: Callable[[], float | None] = lambda: None,
    hub: Hub | None = None,
) -> Path:
    """Fetch an adapter into huggingface_hub's cache and return its snapshot. Resumes what was begun.

    `check` gets adapter_config.json before the weights are fetched, and raises CliError. `stop` ends the
    download from another thread. Offline it is taken from the cache. Raises CliError and DownloadStopped.
    """
    match = HUB_ID.fullmatch(name)
    assert match is not None, "callers ask `is_from_hub` first"
    repo, revision = Repo(hub_cache(environ), match["repo"]), match["revision"]
    hub = hub or Hub.of_environment()
    hub.note = note
    try:
        if hub.offline:
            return _cached(repo, revision)
        try:
            return _download(hub, repo, revision, stop, report, check, rate)
        except OSError as error:
            raise errors.of_os_error(error, repo.cache) from error
    except HubError as error:
        raise CliError(error.what, error.why, error.fix, error.exit) from None


def _cached(repo: Repo, revision: str | None) -> Path:
    """Return the snapshot that was fetched earlier. Raises HubError."""
    commit = repo.refs().get(revision or "main", revision or "")
    folder = repo.snapshot(commit) if commit else repo.folder
    if not all((folder / name).is_file() for name in FILES):
        raise errors.offline()
    return folder


def _download(
    hub: Hub,
    repo: Repo,
    revision: str | None,
    stop: threading.Event,
    report: Report,
    check: Callable[[Mapping[str, object]], object],
    rate: Callable[[], float | None],
) -> Path:
    retries = Retries()
    listing = with_retries(
        lambda: hub.list_files(repo.name, revision), stop, retries, hub.note, outlasts=False
    )
    files = choose_adapter_files(listing)
    check(hub.read_json(listing, CONFIG, CONFIG_LIMIT) or {})
    total = sum(file.size for file in files)
    need, have = 2 * total + DISK_RESERVE, free_space(repo.cache)  # `add_adapter` makes a copy
    if need > have:
        raise errors.disk_full(repo.cache, need, have)
    context = TransferContext(hub.web, repo, stop, RateLimiter(rate), retries, hub.note)
    progresses = {file: TransferProgress(file.size) for file in files}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.25):
            report(sum(each.done for each in progresses.values()), total)
            if stop.is_set():
                hub.web.cut()

    watching = threading.Thread(target=watch, name="llmbox-adapter", daemon=True)
    watching.start()
    try:
        for file, progress in progresses.items():
            fetch(context, file, hub.url(repo.name, listing.commit, file.name), progress)
    finally:
        is_over.set()
        watching.join(5.0)
    if stop.is_set():
        raise DownloadStopped
    return repo.publish(listing.commit, revision, {file.name: file.etag for file in files})


def choose_adapter_files(listing: RepoListing) -> list[RepoFile]:
    """Return the two files of an adapter. Raises HubError for a repository without them."""
    found = [file for name in FILES if (file := listing.file(name)) is not None]
    if len(found) == len(FILES):
        return found
    if listing.file(CONFIG) is None:
        raise HubError(
            "no_weights",
            f"{listing.repo} is not an adapter",
            f"it has no {CONFIG}",
            f"to download a model: llmbox pull {listing.repo}",
        )
    why, fix = f"it has no {WEIGHTS}", "look for another adapter on the hub"
    if listing.file(PICKLE) is not None:
        why += f", and {PICKLE} is a pickle, which could run code"
        fix = "ask its authors for safetensors, or save it again with PEFT on a machine that may run it"
    raise HubError("no_weights", f"the adapter {listing.repo} cannot be read", why, fix)
