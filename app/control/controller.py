"""Control operations while the daemon serves: load and unload models, reload settings."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmbox.engine.errors import EngineError
from llmbox.engine.model_config.config import parse_config

from .. import log as logs
from ..config.entries import Scalar
from ..config.loader import OVERRIDES, LoadedSettings, check_value, unknown_key
from ..config.settings import schema
from ..engines.loaded_model import LoadedModel
from ..errors import ApiError, CliError, Exit
from ..lifecycle.instance import RunningDaemon
from ..models.catalog import ModelRef, in_memory, on_disk, resolve
from ..models.load_request import ModelRequest, with_draft_path
from ..services import AvailableModel, Services
from .library import Library
from .model_scheduler import ModelScheduler, SchedulerDeps
from .residency import EvictedModels


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
            plan, _ = self._library.planner.plan(parse_config(path))
        except (EngineError, OSError):
            return None
        return None if plan is None else plan.context


def _changed(path: Path) -> int:
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0


log = logging.getLogger("llmbox.daemon")


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a model could not be loaded. `code` is a word such as `bad_model`."""

    model: str
    cause: str
    code: str
    status: int = 400
    """HTTP status of the answer to a client that waits for the load."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers of that answer."""


class DaemonController:
    """Entry point of all control operations. Use it only from the daemon's event loop."""

    def __init__(
        self,
        services: Services,
        running: RunningDaemon,
        loaded: LoadedSettings,
        reload: Callable[[], LoadedSettings],
        begun_with: Mapping[str, Any],
        checks: Callable[[], list[dict[str, str]]] = list,
    ) -> None:
        self.services = services
        self.running = running
        self.loaded = loaded
        self.library = Library(services)
        deps = SchedulerDeps(
            settings=lambda: services.settings,
            find=self.library.find,
            pull=self.library.pull_for_request,
            registry=self.library.registry,
            loads_file=services.paths.loads_file,
        )
        self.residency = ModelScheduler(services.engines, services.events, deps)
        services.find_model = self.residency.find
        services.offers = AvailableModels(services, self.library, self.residency.evicted).all
        services.real_name = self.residency.real_name
        services.aliases = lambda: self.library.registry.read_or_nothing().aliases
        self.begun_with = begun_with
        """Flags and models of the start, for `restart`."""
        self.checks = checks
        """Runs the checks of `llmbox doctor`; call it in a thread."""
        self.failure_codes: dict[str, str] = {}
        """Error code by model, to go with the engine manager's reason."""
        self.asked: dict[str, Mapping[str, Scalar]] = {}
        """Options that a model's load named, by short key; by model."""
        self._started_settings = loaded.settings
        self._reload = reload
        self._tasks: set[asyncio.Task[Failure | None]] = set()

    # ------------------------------------------------------------------ models

    def begin_load(self, request: ModelRequest, ttl: float | None = None) -> "asyncio.Task[Failure | None]":
        """Load in the background. The task's result is the failure, or None. Raises ApiError 409 and
        CliError.

        `ttl`: idle seconds after which the model is unloaded; None keeps it.
        """
        config = request.config(self.services.settings.model)
        name = request.served_name
        names = self.library.registry.read_or_nothing().aliases
        for wanted in {name, request.alias or name} & names.keys():
            if names[wanted].adapter:
                raise CliError(
                    f"{wanted} is an adapter",
                    "the model would hide it",
                    "choose another --alias",
                    Exit.CONFLICT,
                )
        self.failure_codes.pop(name, None)
        if not self.services.engines.knows(name):
            self.services.events.publish("model.loading", {"model": name, "reason": "asked for"})
        loading = self.services.engines.begin_load(config, alias=request.extra_alias)
        self.asked[name] = request.short_options
        task = asyncio.create_task(self._outcome(name, loading, ttl))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _outcome(
        self, name: str, loading: "asyncio.Future[LoadedModel]", ttl: float | None
    ) -> Failure | None:
        try:
            model = await asyncio.shield(loading)
        except ApiError as error:
            failure = Failure(name, error.message, error.code or "load_failed", error.status, error.headers)
            self.failure_codes[name] = failure.code
            return failure
        model.on_request = False
        await self.residency.keep(model, ttl=ttl)
        info = model.supervisor.info
        window = f", context {info.context_window} tokens" if info else ""
        log.info("%s is ready%s", name, window)
        return None

    async def unload(self, name: str | None) -> list[str]:
        """Unload one model by name or alias, or all, failed ones too. Raises ApiError 404."""
        engines = self.services.engines
        if name is not None:
            name = self.residency.real_name(name)
            had_left = self.residency.evicted.forget(name)
            if engines.knows(name) or not had_left:
                await engines.unload(name)
            self.asked.pop(name, None)
            log.info("%s is unloaded", name)
            return [name]
        names = [model.name for model in engines.models()]
        names += [supervisor.name for supervisor in engines.loading()] + list(engines.failures())
        for each in names:
            await engines.unload(each)
        for evicted in self.residency.evicted.all():
            self.residency.evicted.forget(evicted.name)
        return names

    async def places(self, names: Iterable[str]) -> dict[str, Path]:
        """Folders of the models that clients may name: loaded, loading, or on this disk."""
        held = {name: self._held(name) for name in names}

        def look() -> dict[str, Path]:
            refs = {name: self.library.find(name) for name, place in held.items() if place is None}
            found = {name: ref.path for name, ref in refs.items() if ref is not None}
            return {name: place for name in held if (place := held[name] or found.get(name)) is not None}

        return await asyncio.to_thread(look)

    def _held(self, name: str) -> Path | None:
        real = self.residency.real_name(name)
        if (model := self.services.engines.find(real)) is not None:
            return model.path
        loading = (each for each in self.services.engines.loading() if each.name == real)
        config = next((each.config for each in loading), None)
        if config is None and (evicted := self.residency.evicted.find(real)) is not None:
            config = evicted.config
        return None if config is None else Path(config.model_path)

    def model_request(self, text: str, alias: str | None, options: Mapping[str, object]) -> ModelRequest:
        """Parse a load request of the admin API. Raises CliError for invalid values."""
        values: dict[str, Scalar] = {}
        for key, value in options.items():
            row = schema().get(f"model.{key}")
            if row is None or row.name == OVERRIDES:
                raise unknown_key(f"model.{key}", "options")
            values[row.name] = check_value(row, value, f"options.{key}")
        request = ModelRequest(self.resolve(text), alias, with_draft_path(values, self.resolve))
        request.config(self.services.settings.model)  # checks the name
        return request

    def resolve(self, text: str) -> ModelRef:
        """Find the model that a name given by a user means: in memory, an alias, on this disk. Raises
        CliError.

        Reads a few small files. May be called from any thread.
        """
        return resolve(text, os.environ, self.library.registry.read(), self.in_memory())

    def in_memory(self) -> dict[str, ModelRef]:
        """Loaded, loading and evicted models by each of their names. May be called from any thread."""
        engines = self.services.engines
        found: dict[str, ModelRef] = {}
        for evicted in self.residency.evicted.all():
            ref = in_memory(evicted.name, Path(evicted.config.model_path))
            found |= dict.fromkeys((*evicted.aliases, evicted.name), ref)
        for each in engines.loading():
            found[each.name] = in_memory(each.name, Path(each.config.model_path))
        for model in engines.models():
            found |= dict.fromkeys((*model.aliases, model.name), in_memory(model.name, model.path))
        return found

    async def close(self) -> None:
        """Stop watching loads. The engines themselves end with `engines.close`."""
        await self.library.downloads.close()
        await self.residency.close()
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # ------------------------------------------------------------------ settings

    def reload(self) -> None:
        """Reload the settings (SIGHUP). If they are invalid the old ones stay, with an error in the log."""
        try:
            loaded = self._reload()
        except CliError as error:
            log.error("configuration not reloaded, the old one stays: %s (%s)", error.what, error.why)  # noqa: TRY400 - the trace says nothing
            return
        self.loaded = loaded
        self.services.settings = loaded.settings
        self.services.gateway.apply(loaded.settings)
        self.services.telemetry.targets = loaded.settings.usage.targets
        logs.set_level(loaded.settings.log)
        self.residency.failed.clear()
        waiting = self.pending_restart()
        log.info("configuration reloaded%s", f"; after a restart: {', '.join(waiting)}" if waiting else "")

    def pending_restart(self) -> list[str]:
        """Keys whose new value takes effect at the next start."""
        return [
            name
            for name, row in schema().items()
            if not row.live and self.loaded.settings.get(name) != self._started_settings.get(name)
        ]
