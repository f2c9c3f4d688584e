"""What a model would take in this machine's memory: the engine's estimate, asked before it is started."""

from dataclasses import dataclass, replace
from pathlib import Path

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit, EngineError
from llmbox.engine.estimator import MemoryBudget, MemoryPlan, estimate
from llmbox.engine.machine import Machine
from llmbox.engine.model_config import parse_config

from ..engines.budget import Place, device_of


@dataclass(frozen=True, slots=True)
class Sizes:
    device: Place
    need: int
    """Bytes without which it would have to lower its context or refuse: one request of full context."""
    want: int
    """Bytes that it takes when there is room."""


def sizes(config: EngineConfig, machine: Machine, budget: int, ours: int) -> Sizes | None:
    """None where nothing can be said: then loading will tell what is wrong.

    `ours` are bytes that our models hold on the device. Memory that others hold is not counted on. What
    cannot be served within `budget` at all raises DoesNotFit.
    """
    device = device_of(machine, config.device)
    if device == "cuda" and not machine.gpus:
        return None
    available = min(budget, MemoryBudget.of(machine, device).available + ours)
    try:
        shape = parse_config(Path(config.model_path)).shape(config.context)
        have = replace(MemoryBudget.of(machine, device), available=available)
        plan = estimate(shape, have, config)
        if plan.is_lowered and config.memory_bytes is None:  # a larger share of the budget keeps its context
            plan = estimate(shape, have, replace(config, memory_bytes=available))
    except DoesNotFit:
        raise
    except EngineError:
        return None
    return Sizes(device, least_bytes(plan), plan.total_bytes * plan.ranks_in_memory)


def least_bytes(plan: MemoryPlan) -> int:
    blocks = -(-plan.context // plan.block_size)
    kv = blocks * plan.block_size * plan.kv_bytes_per_token
    return (plan.weights_bytes + plan.workspace_bytes + kv) * plan.ranks_in_memory
