"""Run one seed from its beginning to its verdict."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from .machine import ProcessKilled
from .scenario import Scenario, draw_scenario
from .step_rules import BrokenRuleError
from .virtual_loop import StuckError
from .world import World


@dataclass(slots=True)
class SimulationReport:
    """Result of one run."""

    seed: int
    weather: str
    broken: str
    """Rule that does not hold; empty if all do."""
    digest: str
    virtual_s: float
    requests: int
    deaths: int
    outcomes: dict[str, int]


def simulate(seed: int, scenario: Scenario | None = None, world: World | None = None) -> SimulationReport:
    """Run one seed. Never raises for a broken rule: the report says which. `world` is made for the scenario,
    for callers who look into it afterwards.
    """
    scenario = scenario or draw_scenario(seed)
    world = world or World(scenario)
    broken = ""
    with world.patched():
        try:
            world.loop.run_until_complete(world.run())
            world.finish()
        except (BrokenRuleError, StuckError, TimeoutError) as error:
            broken = f"{type(error).__name__}: {error}"
        except RuntimeError:
            if not world.loop.failures:
                raise
        world.broken = broken = "; ".join([*world.loop.failures, *filter(None, [broken])])
        _clear_up(world)
    counts: dict[str, int] = {}
    for outcome in world.clients.outcomes.values():
        told = outcome.error.code if outcome.error is not None else outcome.status
        counts[told or ""] = counts.get(told or "", 0) + 1
    return SimulationReport(
        seed=seed,
        weather=scenario.weather,
        broken=broken,
        digest=world.trace.hexdigest(),
        virtual_s=world.loop.time() - 1000.0,
        requests=len(world.clients.outcomes),
        deaths=sum(bool(death.cause) for death in world.machine.deaths),
        outcomes=counts,
    )


def _clear_up(world: World) -> None:
    """End processes and tasks that a broken run has left."""
    for process in world.machine.processes.values():
        if process.greenlet and process.exited is None:
            process.exited = -9
            with suppress(BaseException):  # it is thrown away
                process.greenlet.throw(ProcessKilled(9))
    tasks = world.loop.tasks
    for task in tasks:
        task.cancel()
    if tasks:
        world.loop.set_exception_handler(lambda *_: None)
        with suppress(StuckError):
            world.loop.run_until_complete(asyncio.wait(tasks))
    world.loop.close()
