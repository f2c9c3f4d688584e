"""Model library of the daemon: models on this disk and downloads in progress."""

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmbox.engine.checkpoint.formats.weight_format import GgufFormat
from llmbox.engine.errors import DeviceError, EngineError
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.model_config.encoders.config import is_declared
from llmbox.engine.weights.packed_cache.cache import PackedWeightCache

from ..errors import ApiError, CliError, Exit
from ..fit.recommendations import LocalPlanner, Recommendation
from ..hub.adapter_download import AdapterFetch
from ..hub.download import DownloadSettings
from ..hub.download_queue import Downloads
from ..hub.errors import HubError
from ..hub.local_models import RemovableModel, RemovedModel, find_removable, remove
from ..hub.model_info import SearchResult, ask_recommended, search
from ..hub.repo_files import Hub
from ..models.catalog import HUB_ID, ModelRef, find_served, hub_cache
from ..models.gguf_folders import weights_of
from ..models.registry import Registry, full_name, keep_hub_facts, recommended
from ..services import Services
from ..text.tokenizer.text_loader import read_generation_defaults, read_template
from ..util import formatting
from .kv_cache import prune_kv_cache

RETRY_DOWNLOAD = 10
"""Seconds until a client should ask again for a model that is being fetched."""
STATUS_OF_EXIT = {Exit.NOT_FOUND: 404, Exit.DENIED: 403, Exit.CONFLICT: 409}


class Library:
    """Models on disk and on the hub: listing, search, fit, deletion.

    Use it only from the daemon's event loop, except where a method says otherwise.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.registry = Registry(services.paths.registry_file, has_working_directory=False)
        settings = services.settings.hub
        setup = DownloadSettings(
            cache=hub_cache(os.environ),
            state_file=services.paths.downloads_file,
            fit=lambda config: self.planner.plan(config)[1],
            bandwidth=self.bandwidth,
            files_at_once=settings.files_at_once,
        )
        self.downloads = Downloads(setup, services.events)
        self.adapter_fetches: dict[str, AdapterFetch] = {}
        """Adapters that the panel adds from the hub, by name."""

    def find(self, name: str) -> ModelRef | None:
        """Find the model that a client may request by this name; None if it is not on this disk. Reads a few
        small files.
        """
        return find_served(name, os.environ, self.registry.read_or_nothing())

    @property
    def planner(self) -> LocalPlanner:
        """Planner of models alone on this machine, with the settings of now."""
        return LocalPlanner(self._services.settings, self._services.paths, os.environ)

    async def recommend(self) -> list[Recommendation]:
        """Plan the recommended models on this machine; none where it lacks the device of the settings."""
        try:
            return await asyncio.to_thread(self.planner.recommend, self.registry.read_or_nothing())
        except DeviceError:
            return []

    async def refresh_recommended(self) -> tuple[int, dict[str, HubError]]:
        """Ask the hub for sizes and licenses of the recommended models and keep them.

        Returns how many answered, and the failures by repository. Raises HubError, and ApiError 507 where
        the answers cannot be kept.
        """

        def refresh() -> tuple[int, dict[str, HubError]]:
            found, failed = ask_recommended(Hub.of_environment())
            try:
                keep_hub_facts(self._services.paths.recommended_file, found)
            except OSError as error:
                raise ApiError(
                    507,
                    f"The hub's data cannot be saved: {error.strerror or error}. "
                    "Free some space, then try again.",
                    "disk_full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else "storage_error",
                    type="server_error",
                ) from error
            return len(found), failed

        return await asyncio.to_thread(refresh)

    def pull_for_request(self, name: str) -> None:
        """Fetch a model that a request names, where `hub.pull_on_request` allows it. Does nothing otherwise.

        Raises ApiError 503 with Retry-After while it is under way, and the reason of a download that failed.
        """
        allowed = self._services.settings.hub.pull_on_request
        repo = full_name(name)
        is_recommended = any(model.repo == repo for model in recommended())
        if allowed == "off" or not (is_recommended or (allowed == "any" and HUB_ID.fullmatch(repo))):
            return
        known = next((each for each in self.downloads.all() if each.model == repo), None)
        if known is None or known.state in {"ready", "cancelled"}:
            known = self.downloads.start(repo)
        if known.error is not None or known.state == "paused":
            reason = known.error
            why = f"{reason.what}: {reason.why}" if reason else "its download is paused"
            message = f"{repo} could not be fetched: {why}. On the box itself: llmbox pull {repo}"
            raise ApiError(503, message, "pull_failed", "model")
        share = f", {known.done / known.total:.0%} of {formatting.size(known.total)}" if known.total else ""
        message = f"{repo} is being fetched ({known.state}{share})."
        error = ApiError(503, message, "model_downloading", "model")
        error.headers = {"Retry-After": str(RETRY_DOWNLOAD)}
        raise error

    async def search(self, text: str, limit: int) -> list[SearchResult]:
        return await asyncio.to_thread(lambda: search(Hub.of_environment(), text, limit, self.planner.plan))

    async def remove(self, names: Sequence[str]) -> list[RemovedModel]:
        """Delete models, all or none: every name is checked first. Raises ApiError 400, 403, 404, 409."""
        try:
            known = self.registry.read()
            found = await asyncio.to_thread(
                lambda: [find_removable(name, os.environ, known) for name in names]
            )
            for each in found:
                self._require_unused(each)
            removed = []
            for each in found:
                removed.append(await asyncio.to_thread(remove, each, self.registry))
                if each.repo is not None:
                    self.downloads.forget(each.repo.name)
                self._services.events.publish(
                    "model.deleted", {"model": each.name, "freed": removed[-1].freed}
                )
        except CliError as error:
            status = STATUS_OF_EXIT.get(error.exit, 400)
            code = "model_not_found" if status == 404 else "cannot_delete"
            raise ApiError(status, f"{error.what}: {error.why}", code, "models") from error
        paths, settings = self._services.paths, self._services.settings.cache
        await asyncio.to_thread(PackedWeightCache(paths.repacked, 0).prune)
        await asyncio.to_thread(prune_kv_cache, paths, settings)
        return removed

    def _require_unused(self, found: RemovableModel) -> None:
        engines = self._services.engines
        paths = [model.path for model in engines.models()]
        paths += [Path(supervisor.config.model_path) for supervisor in engines.loading()]
        places = [found.folder.resolve()]
        if found.links:
            places = [link.resolve() for link in found.links]
        if any(weights_of(path).is_relative_to(place) for path in paths for place in places):
            raise ApiError(
                409, f"{found.name} is in memory. Unload it first: llmbox unload {found.name}", "model_busy"
            )
        if found.repo is not None and self.downloads.is_open(found.repo.name):
            raise ApiError(
                409,
                f"{found.name} is being downloaded. Cancel that first: llmbox pull --cancel {found.name}",
                "model_busy",
            )

    def bandwidth(self) -> float | None:
        """Return the cap of downloads in bytes a second, None for no cap."""
        limit = self._services.settings.hub.bandwidth
        return None if limit is None else limit * 1e6


_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModelFacts:
    """Facts of one model folder. Unreadable parts are left out: loading reports the problem."""

    size: int
    """Bytes of all files."""
    modified: float
    """Unix seconds."""
    digest: str
    """64 hex digits that change when a file changes."""
    config: ModelConfig | None = None
    template: str | None = None
    defaults: dict[str, float] = field(default_factory=dict)
    """Default sampling parameters."""
    for_vectors: bool = False
    """The model makes embeddings, and no text."""
    sees: bool = False
    """The model reads images, where it runs on a CPU."""

    @property
    def parameters(self) -> int | None:
        return None if self.config is None else self.config.num_parameters

    @property
    def stored_as(self) -> str:
        """Type of the weights in the files; empty when unknown."""
        if self.config is None:
            return ""
        stored = self.config.stored
        if isinstance(stored, GgufFormat):
            return stored.label
        return self.config.quant or (stored.label if stored else _SHORT[self.config.dtype])


def read_card(folder: Path) -> LocalModelFacts:
    """Read the card of a folder. Reads small files only. May be called from any thread."""
    stamps = {
        path.relative_to(folder).as_posix(): _stamp(path) for path in folder.rglob("*") if path.is_file()
    }
    listing = "".join(f"{name}\0{mark}\n" for name, (mark, _, _) in sorted(stamps.items()))
    config, template, defaults = None, None, {}
    with contextlib.suppress(EngineError, OSError):
        config = parse_config(folder)
    with contextlib.suppress(EngineError, OSError):
        template = read_template(folder)
    with contextlib.suppress(EngineError, OSError):
        defaults = read_generation_defaults(folder)
    return LocalModelFacts(
        size=sum(size for _, size, _ in stamps.values()),
        modified=max((at for _, _, at in stamps.values()), default=0.0),
        digest=hashlib.sha256(listing.encode()).hexdigest(),
        config=config,
        template=template,
        defaults=defaults,
        sees=config is not None and config.vision is not None,
        for_vectors=is_declared(folder) or (config is not None and not config.has_head),
    )


def _stamp(path: Path) -> tuple[str, int, float]:
    """Return (identity of the content, bytes, Unix seconds). In a hub cache a file is named by its hash."""
    status = path.stat()
    mark = path.resolve().name if path.is_symlink() else f"{status.st_size} {status.st_mtime_ns}"
    return mark, status.st_size, status.st_mtime
