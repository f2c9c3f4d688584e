"""Model scheduler: loads models on request, unloads idle ones, evicts models to make room.

A model that the box's owner loaded is not evicted for a request. If its time to live ended or the owner
loaded another, it is loaded again with the same options when a request names it.

All such decisions are made here; the eviction policy is `engines.eviction`. It works by timers only: nothing
runs while nothing can expire.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit
from llmbox.engine.hardware.machine import Machine, read_machine
from llmbox.engine.planning.estimator import show_bytes

from ..config.settings import Settings
from ..engines import eviction
from ..engines.admission import draining
from ..engines.eviction import (
    HOST,
    AllocationFailure,
    Place,
    ResidentModel,
    choose_placement,
    expired,
    next_look,
)
from ..engines.loaded_model import LoadedModel
from ..engines.manager import EngineManager, wait_for_load
from ..errors import ApiError
from ..events import Events
from ..models.catalog import ModelRef
from ..models.load_request import ModelRequest
from ..models.registry import Alias, Registry, full_name
from ..util.formatting import hide_folders
from . import residency
from .residency import EvictedModel, MemoryNeed, ResidentModels

log = logging.getLogger("llmbox.daemon")

LEAST_WAIT = 0.05
"""Seconds between attempts to unload a model: it may be busy for a long time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerDeps:
    """Dependencies of the scheduler; replaced in tests."""

    settings: Callable[[], Settings]
    find: Callable[[str], ModelRef | None]
    """Find a model on disk by a name that clients may use."""
    registry: Registry
    pull: Callable[[str], None] = lambda _: None
    """Fetch a model that is not on disk, if requests may; raises ApiError while it is under way."""
    loads_file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    machine: Callable[[], Machine] = read_machine
    device: Callable[[Machine, str], Place] = eviction.device_of
    budgets: Callable[[Machine, Place, float | None], tuple[int, ...]] = eviction.budgets
    sizes: Callable[[EngineConfig, Machine, tuple[int, ...], Mapping[int, int]], MemoryNeed | None] = (
        residency.sizes
    )
    """Estimate the memory of a config, within the budget of each memory, given the bytes that our models hold
    there.
    """


class ModelScheduler:
    """Use it only from the daemon's event loop."""

    def __init__(self, engines: EngineManager, events: Events, deps: SchedulerDeps) -> None:
        self._engines = engines
        self._events = events
        self._deps = deps
        self._admitting = asyncio.Lock()
        self._memory = ResidentModels(engines)
        self._wanted: dict[str, asyncio.Task[LoadedModel]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[list[int]]] = set()
        self.evicted = residency.EvictedModels()
        self.failed = residency.FailedLoads(deps.clock)
        self.adapters_used: dict[str, float] = {}
        """Unix time of the last request that named an adapter, by its name."""
        engines.admit = self.admit
        engines.clock = deps.clock

    # ------------------------------------------------------------------ requests

    async def find(self, name: str | None) -> LoadedModel:
        """Find the model for a request, loading it if it is on disk. Raises ApiError as
        `EngineManager.get`.
        """
        if name is None:
            return self._engines.get(None)
        alias = self._alias(name)
        real = await self._ensure(name)
        if alias is not None and alias.adapter and real == name:
            raise ApiError(
                404,
                f"The base of the adapter {name!r} is not on this machine; llmbox lora ls names it.",
                code="model_not_found",
                param="model",
            )
        model = self._engines.get(real)
        if alias is None:
            return model
        variant = model.with_alias_defaults(alias.sampling, alias.system, alias.context)
        if not alias.adapter:
            return variant
        self.adapters_used[name] = time.time()
        return replace(variant, name=name, adapter=str(self._deps.registry.adapters_home / alias.adapter))

    def _alias(self, name: str) -> Alias | None:
        if self._engines.knows(name):
            return None
        return self._deps.registry.read_or_nothing().aliases.get(name)

    def real_name(self, name: str) -> str:
        """Map a model's name, an alias or an adopted folder's name to the name that the model is served
        under. Other names are returned unchanged.
        """
        if self._engines.knows(name):
            return name
        names = self._deps.registry.read_or_nothing()
        alias = names.aliases.get(name)
        target = name if alias is None else alias.model
        place = names.directories.get(target, target if alias is not None else None)
        if place is None or self._engines.knows(target):  # clients may not name paths
            return target if self._engines.knows(target) else full_name(target)
        return (
            self._engines.find_name_by_path(Path(place))
            or self.evicted.find_name_by_path(Path(place))
            or target
        )

    async def _ensure(self, name: str) -> str:
        """Load the model if needed. Returns the name to look it up by, which may still not be found."""
        real = self.real_name(name)
        if (loading := self._wanted.get(real)) is not None:
            await wait_for_load(loading, draining())
        if self._engines.knows(real):
            return real
        load_on_request = self._deps.settings().memory.load_on_request
        evicted = self.evicted.find(real)
        if evicted is not None and not load_on_request:
            raise evicted.unavailable()
        if evicted is not None and await asyncio.to_thread(Path(evicted.config.model_path).exists):
            return await self._load_once(evicted.name, lambda: self._bring_back(evicted))
        ref = await asyncio.to_thread(self._deps.find, name)
        if ref is None:
            self._deps.pull(real)
            return name
        if not load_on_request and ref.name not in self._wanted:
            return ref.name
        return await self._load_once(ref.name, lambda: self._load(ref))

    async def is_available(self, name: str) -> bool:
        """Return whether a model is in memory or on disk, for an alias or adapter the model behind it."""
        real = self.real_name(name)
        if self._engines.knows(real):
            return True
        evicted = self.evicted.find(real)
        if evicted is not None and await asyncio.to_thread(Path(evicted.config.model_path).exists):
            return True
        return await asyncio.to_thread(self._deps.find, name) is not None

    async def _load_once(self, name: str, load: Callable[[], Coroutine[Any, Any, LoadedModel]]) -> str:
        """Load a model once for all requests that wait for it. Returns its name."""
        if (loading := self._wanted.get(name)) is None:
            if self._engines.knows(name):
                return name
            loading = asyncio.create_task(load(), name=f"request loads {name}")
            self._wanted[name] = loading
            loading.add_done_callback(lambda task: self._loaded(name, task))
        await wait_for_load(loading, draining())
        return name

    async def _load(self, ref: ModelRef) -> LoadedModel:
        settings = self._deps.settings()
        model = await self._load_config(ModelRequest(ref).config(settings.model))
        await self.keep(model, ttl=settings.memory.ttl or None)
        return model

    async def _bring_back(self, evicted: EvictedModel) -> LoadedModel:
        """Load an evicted model with the options, aliases and time to live that its owner gave it."""
        model = await self._load_config(evicted.config)
        model.on_request = False
        model.aliases |= {alias for alias in evicted.aliases if not self._engines.knows(alias)}
        await self.keep(model, ttl=evicted.ttl)
        return model

    async def _load_config(self, config: EngineConfig) -> LoadedModel:
        await asyncio.to_thread(self.failed.require_retry, config)
        log.info("%s is loaded because a request names it", config.name)
        self._events.publish("model.loading", {"model": config.name, "reason": "a request names it"})
        try:
            return await self._engines.load(config, on_request=True)
        except ApiError as error:
            with contextlib.suppress(ApiError):  # a failed request must not count as a failure of the daemon
                await self._engines.unload(config.name)
            error.message = hide_folders(error.message, config.model_path)
            await asyncio.to_thread(self.failed.add, config, error)
            raise

    def _loaded(self, name: str, task: "asyncio.Task[LoadedModel]") -> None:
        del self._wanted[name]
        if not task.cancelled():
            task.exception()  # reported to the requests that waited

    # ------------------------------------------------------------------ time to live, admission, eviction

    async def keep(self, model: LoadedModel, *, ttl: float | None) -> None:
        """Set the time to live of a model that was just loaded."""
        model.ttl = model.lasting_ttl = ttl
        self.evicted.forget(model.name)
        self.failed.forget(model.name)
        self._arm()
        if self._deps.loads_file is not None:
            await asyncio.to_thread(residency.note_load, self._deps.loads_file, model)

    def pin(self, name: str, *, pinned: bool) -> LoadedModel:
        """Pin or unpin a model. A pinned model is neither evicted nor expired. Raises ApiError 404."""
        model = self._engines.find(self.real_name(name))
        if model is None:
            raise ApiError(404, f"No model {name!r} is in memory.", "model_not_found", "model")
        model.pinned = pinned
        self._events.publish("model.pinned" if pinned else "model.unpinned", {"model": model.name})
        self._arm()
        return model

    def set_ttl(self, model: LoadedModel, ttl: float | None) -> None:
        """Set the idle seconds after which the model is unloaded; None keeps it, 0 ends this load alone."""
        model.ttl = ttl
        if ttl != 0:
            model.lasting_ttl = ttl
        self._arm()

    async def release(self, model: LoadedModel) -> None:
        """Unload the model now, or as soon as it is idle. Raises ApiError 409 for a pinned model."""
        if model.pinned:
            raise ApiError(
                409,
                f"{model.name} is pinned in memory. Unpin it first: llmbox unpin {model.name}",
                "model_pinned",
            )
        if model.busy:
            self.set_ttl(model, 0.0)
        else:
            await self._evict(model.name, "as a request asked")
            self.evicted.forget(model.name)

    async def admit(self, config: EngineConfig, on_request: bool) -> EngineConfig:
        """Make room for a model, and return its config with its share of memory. Raises ApiError when there
        is no room.

        `on_request`: evict only models that requests loaded.
        """
        try:
            admitted = await self._admit(config, on_request=on_request)
        except ApiError as error:
            self._events.publish("model.refused", {"model": config.name, "cause": error.message})
            raise
        # A model that was given up has no time to live until it is started again, which is now.
        asyncio.get_running_loop().call_soon(self._arm)
        return admitted

    async def _admit(self, config: EngineConfig, *, on_request: bool) -> EngineConfig:
        async with self._admitting:
            await self._engines.finish_unloads()  # what they hold would count as that of other programs
            config = await asyncio.to_thread(self._with_adapters, config)
            machine, device, have = await asyncio.to_thread(self._place, config)
            ours: Counter[int] = Counter()
            for each in self.residents(device, but=config.name):
                ours.update(each.takes)
            try:
                size = await asyncio.to_thread(self._deps.sizes, config, machine, have, ours)
            except DoesNotFit as error:
                raise ApiError(400, str(error), "does_not_fit") from error
            if size is None:
                return config
            await self._engines.finish_unloads()  # those that began meanwhile
            # Its own engine ends before one with other options starts.
            residents = [r for r in self.residents(device, but=config.name) if r.name != config.name]
            room = choose_placement(size.requests, size.budgets, residents, keep_owned=on_request)
            if isinstance(room, AllocationFailure):
                raise residency.no_room(config.name, room, residents)
            wanted = next(request for request in size.requests if request.places == room.places)
            share = min(wanted.want, room.free)
            leaving: list[int] = []
            for name in room.evict:
                reason = f"to make room for {config.name}"
                leaving += await self._evict(name, reason, waits=share > size.available)
            staying = (each.takes.get(HOST, 0) for each in residents if each.name not in room.evict)
            host = max(0, size.host - sum(staying))
            beside = {HOST: min(wanted.host_want, host)} if device == "cuda" else {}
            self._memory.reserve(config.name, device, dict.fromkeys(room.places, share) | beside)
            log.info(
                "%s gets %s of the %s for models on %s",
                config.name,
                *map(show_bytes, (share, min(have[place] for place in room.places))),
                device if device == "cpu" else f"each of its GPUs ({', '.join(map(str, room.places))})",
            )
            return replace(
                config,
                memory_bytes=share,
                memory_after=tuple(leaving),
                memory_is_limit=config.memory_bytes is None or config.memory_is_limit,
                gpus=room.places if device == "cuda" else None,
                host_bytes_limit=host if device == "cuda" else None,
            )

    def _with_adapters(self, config: EngineConfig) -> EngineConfig:
        """Return the config with memory for adapters planned, if the model has some."""
        names = self._deps.registry.read_or_nothing()
        bases = {alias.model for alias in names.aliases.values() if alias.adapter}
        folders = {str(ref.path) for base in bases if (ref := self._deps.find(base)) is not None}
        here = {config.model_path, config.name}
        return replace(config, plans_adapters=bool(here & (bases | folders)))

    def _place(self, config: EngineConfig) -> tuple[Machine, Place, tuple[int, ...]]:
        machine = self._deps.machine()
        device = self._deps.device(machine, config.device)
        return machine, device, self._deps.budgets(machine, device, self._deps.settings().memory.budget)

    def residents(self, device: str | None = None, *, but: str = "") -> list[ResidentModel]:
        """Models in memory, and those being loaded with the memory reserved for them."""
        return self._memory.residents(device, but=but)

    async def _evict(self, name: str, reason: str, *, waits: bool = True) -> list[int]:
        """Unload a model that is idle. `waits`: until its memory is free. Returns the processes that may
        still end behind this call.
        """
        model = self._engines.find(name)
        if model is None:  # it expired meanwhile, and may still hold its memory
            await self._engines.finish_unloads()
            return []
        info = model.supervisor.info
        freed = 0 if info is None else sum(residency.bytes_by_memory(info).values())
        if not model.on_request:
            self.evicted.add(model, reason)
        leaving = [] if waits else model.supervisor.pids
        if waits:
            await self._engines.unload(name)
        else:
            self._engines.begin_unload(model)
        log.info("%s is unloaded %s: %s freed", name, reason, show_bytes(freed))
        self._events.publish("model.evicted", {"model": name, "reason": reason, "freed": freed})
        return leaving

    # ------------------------------------------------------------------ expiry

    def _arm(self) -> None:
        """Set the one timer, for the next model that may expire."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._deps.clock()
        at = next_look(now, self.residents())
        if at is not None:
            wait = max(LEAST_WAIT, at - now + 0.001)
            self._timer = asyncio.get_running_loop().call_later(wait, self.expire)

    def expire(self) -> None:
        """Unload the models that were idle for too long, then set the timer for the next one."""
        self._timer = None
        residents = self.residents()
        for name in expired(self._deps.clock(), residents):
            idle = next(each.ttl for each in residents if each.name == name)
            task = asyncio.create_task(self._evict(name, f"after {idle:g} s without requests"))
            self._leaving.add(task)
            task.add_done_callback(self._left)
        if not self._leaving:
            self._arm()

    def _left(self, task: "asyncio.Task[list[int]]") -> None:
        self._leaving.discard(task)
        if not self._leaving and not task.cancelled():
            self._arm()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks: Sequence[asyncio.Task[object]] = [*self._wanted.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._timer is not None:
            self._timer.cancel()
