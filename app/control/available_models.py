"""Models that are not loaded but can be requested: on disk, or being loaded."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from llmbox.engine.errors import EngineError
from llmbox.engine.model_config.config import parse_config

from ..models.catalog import on_disk
from ..services import AvailableModel, Services
from .evicted_models import EvictedModels
from .library import Library


class AvailableModels:
    """List of available models. Each context window is computed once per model and settings."""

    def __init__(self, services: Services, library: Library, evicted: EvictedModels) -> None:
        self._services = services
        self._evicted = evicted
        self._library = library
        self._windows: dict[tuple[object, ...], int | None] = {}

    async def all(self) -> list[AvailableModel]:
        """Models without a known problem: they are supported, and fit this machine when alone."""
        loading = {each.name: Path(each.config.model_path) for each in self._services.engines.loading()}
        evicted = {each.name: Path(each.config.model_path) for each in self._evicted.all()}
        return await asyncio.to_thread(lambda: list(self._offers(loading, evicted)))

    def _offers(self, loading: dict[str, Path], evicted: dict[str, Path]) -> Iterator[AvailableModel]:
        for name, path in loading.items():
            if (window := self._window(path)) is not None:
                yield AvailableModel(name, "loading", window, _changed(path))
        if not self._services.settings.memory.load_on_request:
            return
        for name, path in evicted.items():
            if name not in loading and (window := self._window(path)) is not None:
                yield AvailableModel(name, "on_disk", window, _changed(path))
        for model in on_disk(os.environ, self._library.registry.read_or_nothing()):
            if model.ref.name in loading or model.ref.name in evicted or not model.servable:
                continue
            if (window := self._window(model.ref.path)) is not None:
                yield AvailableModel(model.ref.name, "on_disk", window, int(model.modified))
        for name, alias in self._library.registry.read_or_nothing().aliases.items():
            ref = self._library.find(name)
            if ref is not None and (window := self._window(ref.path)) is not None:
                window = min(window, alias.context or window)
                yield AvailableModel(name, "on_disk", window, _changed(ref.path))

    def _window(self, path: Path) -> int | None:
        """Context window in tokens; None for a model that cannot be served here."""
        settings = self._services.settings
        key = path, _changed(path / "config.json"), settings.model, settings.memory.budget
        if key not in self._windows:
            self._windows[key] = self._compute_window(path)
        return self._windows[key]

    def _compute_window(self, path: Path) -> int | None:
        try:
            plan, _ = self._library.plan(parse_config(path))
        except (EngineError, OSError):
            return None
        return None if plan is None else plan.context


def _changed(path: Path) -> int:
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
