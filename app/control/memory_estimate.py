"""Estimate of the memory that a model needs on this machine, made before its engine is started."""

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit, EngineError
from llmbox.engine.hardware.machine import Machine
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryBudget, MemoryPlan, plans
from llmbox.engine.planning.placement import HOST_MOST

from ..engines.eviction import HOST, MemoryRequest, Place, device_of, total_budget
from ..engines.loaded_model import LoadedModel

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
