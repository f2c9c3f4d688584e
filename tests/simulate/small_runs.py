"""Runs that a test writes down: one model, a few requests, and what happens when."""

from collections.abc import Sequence
from typing import Any

from llmbox.engine.sampling_params import SamplingParams

from .engine import ModelSetup
from .scenario import MachineEvent, RequestSetup, Scenario
from .simulation import SimulationReport, simulate


def make_model(name: str = "m0", **options: Any) -> ModelSetup:
    sizes = {
        "num_blocks": 16,
        "block_size": 4,
        "context": 40,
        "max_running": 3,
        "token_budget": 12,
        "cache": True,
    }
    return ModelSetup(name=name, sizes=sizes, **options)


def make_request(number: int, at: float = 0.0, max_tokens: int = 8, **options: Any) -> RequestSetup:
    return RequestSetup(
        id=f"q{number}",
        model="m0",
        at=at,
        prompt=options.pop("prompt", [number, 1, 2]),
        params=SamplingParams(max_tokens=0, seed=number),
        max_tokens=max_tokens,
        **options,
    )


def run(
    requests: list[RequestSetup], events: Sequence[MachineEvent] = (), **options: Any
) -> SimulationReport:
    setup = options.pop("model", None) or make_model()
    scenario = Scenario(
        seed=1, weather="storm", models=[setup], requests=requests, events=list(events), **options
    )
    return simulate(1, scenario)
