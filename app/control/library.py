"""Model library of the daemon: models on this disk and downloads in progress."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.model_config.config import ModelConfig
from llmbox.engine.planning.estimator import MemoryPlan
from llmbox.engine.weights.packed_cache.cache import PackedWeightCache

from ..errors import ApiError, CliError, Exit
from ..fit.fit import plan_alone
from ..hub.download import Setup
from ..hub.download_queue import Downloads
from ..hub.remove import Removable, Removed, find_removable, remove
from ..hub.repo_files import Hub
from ..hub.search import Hit, search
from ..models.catalog import ModelRef, find_served, hub_cache
from ..models.registry import Registry
from ..services import Services

STATUS_OF_EXIT = {Exit.NOT_FOUND: 404, Exit.DENIED: 403, Exit.CONFLICT: 409}


class Library:
    """Use it only from the daemon's event loop, except where a method says otherwise."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.registry = Registry(services.paths.registry_file)
        settings = services.settings.hub
        setup = Setup(
            cache=hub_cache(os.environ),
            state_file=services.paths.downloads_file,
            fit=lambda config: self.plan(config)[1],
            bandwidth=self._bandwidth,
            files_at_once=settings.files_at_once,
        )
        self.downloads = Downloads(setup, services.events)

    def find(self, name: str) -> ModelRef | None:
        """Find the model that a client may request by this name; None if it is not on this disk. Reads a few
        small files.
        """
        return find_served(name, os.environ, self.registry.read_or_nothing())

    def plan(self, config: ModelConfig) -> tuple[MemoryPlan | None, str]:
        """Memory plan of a model served alone with the default settings, or the reason why it cannot be
        served. May be called from any thread.
        """
        settings = self._services.settings
        model = settings.model
        engine = EngineConfig(
            model_path="",
            name="",
            device=model.device,
            dtype=model.dtype,
            kv_dtype=model.kv_dtype,
            quant=model.quant,
            context=model.ctx,
        )
        return plan_alone(config, read_machine(), engine, settings.memory.budget)

    async def search(self, text: str, limit: int) -> list[Hit]:
        return await asyncio.to_thread(lambda: search(Hub.of_environment(), text, limit, self.plan))

    async def remove(self, names: Sequence[str]) -> list[Removed]:
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
        await asyncio.to_thread(PackedWeightCache(self._services.paths.repacked, 0).prune)
        return removed

    def _require_unused(self, found: Removable) -> None:
        engines = self._services.engines
        paths = [model.path for model in engines.models()]
        paths += [Path(supervisor.config.model_path) for supervisor in engines.loading()]
        place = found.folder.resolve()
        if any(path.resolve().is_relative_to(place) for path in paths):
            raise ApiError(
                409, f"{found.name} is in memory. Unload it first: llmbox unload {found.name}", "model_busy"
            )
        if found.repo is not None and self.downloads.is_open(found.repo.name):
            raise ApiError(
                409,
                f"{found.name} is being downloaded. Cancel that first: llmbox pull --cancel {found.name}",
                "model_busy",
            )

    def _bandwidth(self) -> float | None:
        limit = self._services.settings.hub.bandwidth
        return None if limit is None else limit * 1e6
