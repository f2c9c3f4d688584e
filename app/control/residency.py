"""Residency of models, as the model scheduler sees it: models in memory or being loaded, evicted models,
failed loads, and an estimate of the memory that a model needs, made before its engine is started.

A request may load an evicted model again, with the options of the box's owner, and a model whose load
failed, after a wait.
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit, EngineError
from llmbox.engine.hardware.machine import Machine
from llmbox.engine.ipc.messages import ModelInfo
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryBudget, MemoryPlan, plans, show_bytes
from llmbox.engine.planning.placement import HOST_MOST

from ..engines.eviction import (
    HOST,
    AllocationFailure,
    MemoryRequest,
    Place,
    ResidentModel,
    device_of,
    total_budget,
)
from ..engines.loaded_model import LoadedModel
from ..engines.manager import EngineManager
from ..errors import ApiError, unavailable

log = logging.getLogger("llmbox.daemon")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that a model needs, and memory that is available."""

    device: Place
    requests: tuple[MemoryRequest, ...]
    """Memory request of each possible placement, the first GPUs first."""
    have: tuple[int, ...]
    """Bytes of each memory that our models may take together. Memory held by other programs is not
    included.
    """
    host: int = 0
    """Budget of main memory in bytes, for models on GPUs."""
    available: int = 0
    """Bytes of main memory that are available beside all models in it, for a model on a CPU. A load that
    takes no more need not wait until the models that leave for it are gone.
    """

    @property
    def budgets(self) -> dict[int, int]:
        return {**dict(enumerate(self.have)), HOST: self.host}


def sizes(
    config: EngineConfig, machine: Machine, budgets: tuple[int, ...], ours: Mapping[int, int]
) -> MemoryNeed | None:
    """Estimate the placements of a model. None when the estimate is impossible: then loading will report the
    problem.

    `ours`: bytes that our models hold in each memory. Raises DoesNotFit for a model that cannot be served
    within `budgets` at all.
    """
    device = device_of(machine, config.device)
    if device == "cuda" and not machine.gpus:
        return None
    budget = MemoryBudget.of(machine, device)
    now = (budget.available, *budget.more_gpus)
    have = tuple(
        min(most, free + ours.get(place, 0))
        for place, (most, free) in enumerate(zip(budgets, now, strict=True))
    )
    host = 0
    if device == "cuda":
        host = min(total_budget(machine, "cpu", None), machine.memory.available + ours.get(HOST, 0))
    budget = replace(budget, available=have[0], more_gpus=have[1:], host_available=host)
    try:
        shape = parse_config(Path(config.model_path)).shape(config.context)
        found = plans(shape, budget, config)
        if found[0].is_lowered and config.memory_bytes is None:  # a larger share keeps its context
            found = plans(shape, budget, replace(config, memory_bytes=max(have), memory_is_limit=True))
    except DoesNotFit:
        raise
    except EngineError:
        return None
    available = machine.memory.available if device == "cpu" else 0
    return MemoryNeed(device, tuple(map(_memory_request, found)), have, host, available)


def _memory_request(plan: MemoryPlan) -> MemoryRequest:
    places = plan.gpus if plan.device == "cuda" else (0,)
    return MemoryRequest(
        places,
        least_bytes(plan),
        plan.total_bytes * plan.ranks_in_memory,
        # The engine takes this share at most of what it is left.
        host=ceil(plan.expert_bytes / HOST_MOST),
        host_want=plan.expert_bytes + plan.host_bytes,
    )


def least_bytes(plan: MemoryPlan) -> int:
    """Minimum bytes that a plan needs of each memory: one request of full context."""
    blocks = -(-plan.context // plan.block_size)
    kv = blocks * plan.block_size * plan.kv_bytes_per_token
    kv += plan.least_window_blocks * plan.block_size * plan.window_bytes_per_token
    states = min(2, plan.state_slots) * plan.slot_bytes
    return (plan.weights_bytes + plan.workspace_bytes + kv + states) * plan.ranks_in_memory


LOADS = 10
"""Loads kept of each model."""
MODELS = 200
_NOTING = threading.Lock()
"""Held from reading the file of loads until it is replaced, so that no record is lost to another thread."""


def note_load(file: Path, model: LoadedModel) -> None:
    """Record a load, once. A full disk loses the record, never the model. May be called from any thread."""
    with _NOTING:
        _note_load(file, model)


def _note_load(file: Path, model: LoadedModel) -> None:
    info = model.supervisor.info
    if info is None:
        return
    known = read_loads(file)
    rows = known.pop(model.name, [])
    if any(row["at"] == model.loaded_at for row in rows):
        return
    rows.append(
        {
            "at": model.loaded_at,
            "device": info.device,
            "dtype": info.dtype,
            "context": info.context_window,
            "predicted_weights": info.weights_bytes,
            "measured_weights": info.measured_weights_bytes,
            "kv": info.kv_bytes,
            "workspace": info.workspace_bytes,
            "seconds": round(info.load_seconds, 3),
        }
    )
    known[model.name] = rows[-LOADS:]
    while len(known) > MODELS:
        del known[next(iter(known))]
    fresh = file.with_suffix(".new")
    try:
        fresh.write_text(json.dumps({"schema": 1, "models": known}) + "\n")
        fresh.replace(file)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        log.warning("cannot note how %s was loaded: %s", model.name, error)


def read_loads(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Recorded loads by model, oldest first. Empty when the file cannot be read."""
    try:
        known = json.loads(file.read_bytes())["models"]
        if all(isinstance(row["at"], int | float) for rows in known.values() for row in rows):
            found: dict[str, list[dict[str, Any]]] = known
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


@dataclass(frozen=True, slots=True)
class EvictedModel:
    """Options that a model was loaded with, and the reason of its eviction."""

    config: EngineConfig
    aliases: frozenset[str]
    ttl: float | None
    reason: str

    @property
    def name(self) -> str:
        return self.config.name

    def unavailable(self) -> ApiError:
        return unavailable(
            f"{self.name} was evicted {self.reason}, and requests do not load models here "
            f"(memory.load_on_request). Ask the owner to load it again: llmbox load {self.name}",
            "model_evicted",
            retry_after=60,
        )


class EvictedModels:
    """Table of evicted models. Kept apart from the models on disk, because a folder loaded by path has no
    name there.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, EvictedModel] = {}

    def add(self, model: LoadedModel, reason: str) -> None:
        self._by_name[model.name] = EvictedModel(model.config, model.aliases, model.lasting_ttl, reason)

    def find(self, name: str) -> EvictedModel | None:
        """Find by name or alias."""
        if (exact := self._by_name.get(name)) is not None:
            return exact
        return next((each for each in self._by_name.values() if name in each.aliases), None)

    def find_name_by_path(self, path: Path) -> str | None:
        """Name of the evicted model with this folder."""
        return next((each.name for each in self.all() if Path(each.config.model_path) == path), None)

    def forget(self, name: str) -> bool:
        """Forget a model. Returns False if there is none."""
        found = self.find(name)
        return found is not None and self._by_name.pop(found.name, None) is not None

    def all(self) -> list[EvictedModel]:
        return list(self._by_name.values())


FIRST_WAIT = 5.0
LONGEST_WAIT = 60.0
"""Seconds between a failed load and the next one that a request may begin; each failure doubles the wait."""


@dataclass(frozen=True, slots=True)
class _FailedLoad:
    error: ApiError
    files: object
    """Stamp of the folder's files at the load."""
    until: float
    wait: float


class FailedLoads:
    """Back-off of loads that requests begin. A change of the model's files, or its owner, ends the wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: dict[str, _FailedLoad] = {}

    def require_retry(self, config: EngineConfig) -> None:
        """Raise the error of the last load, with `Retry-After`, while the model must wait for the next."""
        failed = self._by_name.get(config.name)
        if failed is None:
            return
        left = failed.until - self._clock()
        if left <= 0 or failed.files != _stamp(config):
            return
        seconds = math.ceil(left)
        message = (
            f"{failed.error.message} (Requests may load it again in {seconds} s, or once its files change.)"
        )
        headers = failed.error.headers | {"Retry-After": str(seconds)}
        raise replace(failed.error, message=message, headers=headers)

    def add(self, config: EngineConfig, error: ApiError) -> None:
        """Count a failed load. Errors that carry a `Retry-After` start no wait."""
        if "Retry-After" in error.headers or error.code == "model_unloaded":
            return
        before = self._by_name.get(config.name)
        files = _stamp(config)
        wait = FIRST_WAIT if before is None or before.files != files else min(LONGEST_WAIT, 2 * before.wait)
        self._by_name[config.name] = _FailedLoad(error, files, self._clock() + wait, wait)

    def forget(self, name: str) -> None:
        self._by_name.pop(name, None)

    def clear(self) -> None:
        self._by_name.clear()


def _stamp(config: EngineConfig) -> object:
    """Names, sizes and times of the files in a model's folder; None if it cannot be read."""
    try:
        status = [(path.name, path.stat()) for path in Path(config.model_path).iterdir()]
    except OSError:
        return None
    return sorted((name, each.st_size, each.st_mtime_ns) for name, each in status)


class ResidentModels:
    """Table of the models in memory, with reservations for those that are being loaded."""

    def __init__(self, engines: EngineManager) -> None:
        self._engines = engines
        self._reserved: dict[str, tuple[Place, Mapping[int, int]]] = {}

    def reserve(self, name: str, device: Place, takes: Mapping[int, int]) -> None:
        """Reserve bytes of each memory for a model until its load ends."""
        self._reserved[name] = device, takes

    def residents(self, device: str | None = None, *, but: str = "") -> list[ResidentModel]:
        """Return the models in memory, and those being loaded with the memory reserved for them. `device`:
        only those that take memory which models on this device may take, and by its numbers.
        """
        found = []
        for model in self._engines.models():
            info, state = model.supervisor.info, model.supervisor.state
            if info is None or state == "failed":
                continue
            takes = seen_from(device, info.device, bytes_by_memory(info))
            if not takes:
                continue
            found.append(
                ResidentModel(
                    model.name,
                    takes,
                    model.busy,
                    model.pinned,
                    model.idle_since,
                    model.ttl,
                    owned=not model.on_request,
                )
            )
        loading = {supervisor.name for supervisor in self._engines.loading()}
        for name in [name for name in self._reserved if name not in loading]:
            del self._reserved[name]
        found += [
            ResidentModel(name, takes, busy=True, pinned=False, idle_since=0.0)
            for name, (place, reserved) in self._reserved.items()
            if name != but and (takes := seen_from(device, place, reserved))
        ]
        return found


def bytes_by_memory(info: ModelInfo) -> dict[int, int]:
    """Return the bytes of each memory. All ranks of a CPU model share one memory, a GPU holds one rank."""
    total = info.weights_bytes + info.kv_bytes + info.workspace_bytes
    places = info.gpus if info.device == "cuda" and info.gpus else (0,)
    beside = {HOST: info.host_bytes} if info.host_bytes else {}
    return dict.fromkeys(places, total // len(places)) | beside


def seen_from(device: str | None, place: str, takes: Mapping[int, int]) -> Mapping[int, int]:
    """Return what a model at `place` takes of the memories that models on `device` may take, by the numbers
    that these have there. Main memory is 0 for CPUs and `HOST` beside GPUs. None: all of it, as it is.
    """
    if device in {None, place}:
        return takes
    main = takes.get(HOST if place == "cuda" else 0, 0)
    return {0 if device == "cpu" else HOST: main} if main else {}


def no_room(name: str, room: AllocationFailure, residents: Sequence[ResidentModel]) -> ApiError:
    """Error of a model that does not fit: 503 if models that are busy or pinned are in its way, else 400."""
    where = " of main memory" if room.of_host else ""
    have = f"{show_bytes(max(0, room.have))} are available"
    text = f"{name} needs {show_bytes(room.need, up=True)}{where} and {have}"
    if not room.blockers:
        return ApiError(400, f"{text}: the memory budget is too small for it.", "does_not_fit")
    why = {each.name: each.claim for each in residents}
    return unavailable(
        f"{text} while {', '.join(f'{blocker} is {why[blocker]}' for blocker in room.blockers)}. "
        "Try again later, or ask the owner to unload one.",
        "memory_busy",
        retry_after=5,
    )
