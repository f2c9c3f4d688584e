"""What a model would take in this machine's memories: the engine's estimate, asked before it is started."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit, EngineError
from llmbox.engine.estimator import MemoryBudget, MemoryPlan, plans
from llmbox.engine.machine import Machine
from llmbox.engine.model_config import parse_config

from ..engines.budget import Place, device_of
from ..engines.room import Wish


@dataclass(frozen=True, slots=True)
class Sizes:
    device: Place
    wishes: tuple[Wish, ...]
    """The same cut in other places, the first GPUs first."""
    have: tuple[int, ...]
    """Bytes of each memory that our models may take together, without what others hold there."""


def sizes(
    config: EngineConfig, machine: Machine, budgets: tuple[int, ...], ours: Mapping[int, int]
) -> Sizes | None:
    """None where nothing can be said: then loading will tell what is wrong.

    `ours` are bytes that our models hold in each memory. What cannot be served within `budgets` at all raises
    DoesNotFit.
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
    budget = replace(budget, available=have[0], more_gpus=have[1:])
    try:
        shape = parse_config(Path(config.model_path)).shape(config.context)
        found = plans(shape, budget, config)
        if found[0].is_lowered and config.memory_bytes is None:  # a larger share keeps its context
            found = plans(shape, budget, replace(config, memory_bytes=max(have), memory_is_limit=True))
    except DoesNotFit:
        raise
    except EngineError:
        return None
    return Sizes(device, tuple(map(_wish, found)), have)


def _wish(plan: MemoryPlan) -> Wish:
    places = plan.gpus if plan.device == "cuda" else (0,)
    return Wish(places, least_bytes(plan), plan.total_bytes * plan.ranks_in_memory)


def least_bytes(plan: MemoryPlan) -> int:
    blocks = -(-plan.context // plan.block_size)
    kv = blocks * plan.block_size * plan.kv_bytes_per_token
    return (plan.weights_bytes + plan.workspace_bytes + kv) * plan.ranks_in_memory
