"""Run a scenario against the local daemon: load both variants, interleave rounds, unload, report ratios."""

import asyncio
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import CliError
from .client import Target
from .measure import Ratio, ratio, run
from .scenarios import Figure, Round, Scale, Scenario, Variant
from .workload import Prompts

_SAMPLE_EVERY_S = 0.05


class Admin(Protocol):
    """What a comparison needs of the daemon's admin API (`app/cli/client.py` over the unix socket)."""

    def get(self, path: str) -> dict[str, Any]: ...

    def post(self, path: str, body: object, timeout: float | None = None) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of each variant and the ratio second over first, per figure."""

    scenario: str
    variants: tuple[str, str]
    rounds: int
    figures: dict[str, tuple[float, float, Ratio]]
    errors: list[str]


async def compare(
    admin: Admin,
    url: str,
    model: str,
    scenario: Scenario,
    scale: Scale,
    *,
    rounds: int,
    id_range: tuple[int, int],
    say: Callable[[str], None],
) -> Comparison:
    """Each round visits both variants with the same prompts, in alternating order; round 0 does not count."""
    first, second = scenario.variants(scale)
    results: dict[str, list[Round]] = {first.name: [], second.name: []}
    try:
        for variant in (first, second):
            await _load(admin, model, scenario, variant)
        for number in range(rounds + 1):
            order = (first, second) if number % 2 else (second, first)
            for variant in order:
                work = scenario.workload(Prompts(f"{scenario.name}/{number}", id_range), scale)
                target = Target(url, _alias(scenario, variant))
                result = await _observed(admin, target, work)
                if number:
                    results[variant.name].append(result)
            say(f"{scenario.name}: round {number} of {rounds}" + ("" if number else " (warm-up)"))
    finally:
        for variant in (first, second):
            with suppress(Exception):  # what failed has been raised already
                await asyncio.to_thread(
                    admin.post, "/admin/api/models/unload", {"model": _alias(scenario, variant)}
                )
    return Comparison(
        scenario.name,
        (first.name, second.name),
        rounds,
        {name: _figure(f, results[first.name], results[second.name]) for name, f in scenario.figures.items()},
        [e for rounds_ in results.values() for r in rounds_ for e in r.run.errors],
    )


def _alias(scenario: Scenario, variant: Variant) -> str:
    return f"bench-{scenario.name}-{variant.name}"


async def _load(admin: Admin, model: str, scenario: Scenario, variant: Variant) -> None:
    """A second engine on the same files: a directory under an alias is a model of its own."""
    name = _alias(scenario, variant)
    body = {"model": model, "alias": name, "options": variant.options}
    await asyncio.to_thread(admin.post, "/admin/api/models/load", body)
    while (state := await asyncio.to_thread(_state, admin, name))[0] != "ready":
        if state[0] == "failed":
            raise CliError(f"{name} could not be loaded", state[1], "a smaller --scale, or another model")
        await asyncio.sleep(0.1)


def _state(admin: Admin, name: str) -> tuple[str, str]:
    found = (m for m in admin.get("/admin/api/models")["models"] if m["name"] == name)
    return next(((m["state"], m["cause"]) for m in found), ("failed", "it is gone"))


async def _observed(admin: Admin, target: Target, work: Any) -> Round:
    stats: list[dict[str, Any]] = []
    sampler = asyncio.create_task(_sample(admin, target.model, stats))
    try:
        return Round(await run(target, work), stats)
    finally:
        sampler.cancel()


async def _sample(admin: Admin, model: str, into: list[dict[str, Any]]) -> None:
    while True:
        answer = await asyncio.to_thread(admin.get, "/admin/api/stats")
        into.extend(m["stats"] for m in answer["models"] if m["name"] == model and m["stats"]["running"])
        await asyncio.sleep(_SAMPLE_EVERY_S)


def _figure(read: Figure, first: list[Round], second: list[Round]) -> tuple[float, float, Ratio]:
    a = [read(r) or float("nan") for r in first]
    b = [read(r) or float("nan") for r in second]
    return statistics.median(a), statistics.median(b), ratio(b, a)
