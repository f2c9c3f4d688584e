"""A/B comparison on the local daemon: load both variants, interleave rounds, unload, report ratios."""

import asyncio
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llmbox.engine.config import BLOCK_SIZE

from ..admin_client import Client
from ..errors import CliError
from .client import BenchTarget, Prompts, Workload, heavy_tail, long_arrival, shared_prefix, uniform
from .measure import BenchRun, Ratio, percentile, ratio, run


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the work. A slow model gets fewer and shorter requests of the same kind."""

    requests: int
    prompt: int
    mean_output: int
    longest_output: int
    prefix: int
    long_prompt: int
    streams: int


SCALES = {
    "small": Scale(16, 32, 16, 96, 192, 512, 2),
    "full": Scale(64, 256, 96, 768, 768, 3072, 4),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One side of a comparison: options of `POST /admin/api/models/load`."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One variant's run with what the engine reported meanwhile."""

    run: BenchRun
    stats: list[dict[str, Any]] = field(default_factory=list)
    """Engine gauges sampled during the run."""


Figure = Callable[[MeasuredRun], float | None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`variants[1]` is compared with `variants[0]`, round by round, in every figure."""

    name: str
    question: str
    variants: Callable[[Scale], tuple[Variant, Variant]]
    workload: Callable[[Prompts, Scale], Workload]
    figures: dict[str, Figure]


def output_rate(round_: MeasuredRun) -> float:
    return round_.run.output_rate


def ttft_p50(round_: MeasuredRun) -> float | None:
    return percentile([s.ttft for s in round_.run.good()], 50)


def ttft_of_long(round_: MeasuredRun) -> float | None:
    return percentile([s.ttft for s in round_.run.good("long")], 50)


def worst_gap(round_: MeasuredRun) -> float | None:
    return max((gap for s in round_.run.good("stream") for gap in s.gaps), default=None)


def wasted_slots(round_: MeasuredRun) -> float | None:
    """Return the share of reserved KV slots that hold no token, over all samples in which something ran."""
    used = sum(s["slots_used"] for s in round_.stats)
    reserved = sum(s["blocks_used"] * BLOCK_SIZE for s in round_.stats)
    return 1 - used / reserved if reserved else None


def mean_running(round_: MeasuredRun) -> float | None:
    busy = [s["running"] for s in round_.stats if s["running"]]
    return sum(busy) / len(busy) if busy else None


_PLAIN: dict[str, Any] = {"speculate": "off"}
"""Options without speculation: these comparisons do not cover repetitions in answers."""


def _batching(scale: Scale) -> tuple[Variant, Variant]:
    worst_case = scale.prompt + scale.longest_output
    common = {
        **_PLAIN,
        "kv_tokens": 4 * worst_case,
        "ctx": worst_case,
        "max_running": 64,
        "prefix_cache": False,
    }
    return (
        Variant("static", {**common, "batching": "static"}),
        Variant("continuous", {**common, "batching": "continuous"}),
    )


def _prefix(scale: Scale) -> tuple[Variant, Variant]:
    context = {**_PLAIN, "ctx": scale.prefix + scale.prompt + scale.longest_output}
    return Variant("off", {**context, "prefix_cache": False}), Variant(
        "on", {**context, "prefix_cache": True}
    )


def _chunking(scale: Scale) -> tuple[Variant, Variant]:
    # Without the prefix cache, or the second round would find the first one's prompts.
    context = scale.long_prompt + scale.longest_output
    common = {**_PLAIN, "ctx": context, "token_budget": 256, "prefix_cache": False}
    return (
        Variant("whole", {**common, "chunked_prefill": False}),
        Variant("chunked", {**common, "chunked_prefill": True}),
    )


def _speculate(scale: Scale) -> tuple[Variant, Variant]:
    common = {"ctx": scale.prompt + scale.longest_output}
    return Variant("off", {**common, "speculate": "off"}), Variant("auto", {**common, "speculate": "auto"})


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "batching",
            "static against continuous batching, outputs of capped-exponential length, "
            "KV for 4 worst-case sequences",
            _batching,
            lambda p, s: heavy_tail(p, s.requests, s.requests, s.prompt, s.mean_output, s.longest_output),
            {"output tok/s": output_rate, "KV slots wasted": wasted_slots, "mean running": mean_running},
        ),
        Scenario(
            "prefix",
            "traffic that shares a long prefix, prefix cache off and on",
            _prefix,
            lambda p, s: shared_prefix(p, s.requests, 8, s.prefix, s.prompt, s.mean_output),
            {"output tok/s": output_rate, "TTFT p50 s": ttft_p50},
        ),
        Scenario(
            "prefix-overhead",
            "prompts that share nothing, prefix cache off and on: what the cache costs at 0 % hits",
            _prefix,
            lambda p, s: uniform(p, s.requests, 8, s.prompt, s.mean_output),
            {"output tok/s": output_rate},
        ),
        Scenario(
            "long-prompt",
            "a long prompt arrives while others decode, computed whole or in chunks",
            _chunking,
            lambda p, s: long_arrival(p, s.streams, s.prompt, s.longest_output, s.long_prompt),
            {"TTFT of the long prompt s": ttft_of_long, "worst inter-token gap s": worst_gap},
        ),
        Scenario(
            "speculate",
            "one greedy answer after another, tokens guessed from the request's own text or not: what that "
            "gains depends on how much the answers repeat",
            _speculate,
            lambda p, s: uniform(p, s.requests, 1, s.prompt, s.mean_output),
            {"output tok/s": output_rate},
        ),
    )
}


_SAMPLE_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of each variant and the ratio second over first, for each figure."""

    scenario: str
    variants: tuple[str, str]
    rounds: int
    figures: dict[str, tuple[float, float, Ratio]]
    errors: list[str]


async def compare(
    admin: Client,
    url: str,
    model: str,
    scenario: Scenario,
    scale: Scale,
    *,
    rounds: int,
    id_range: tuple[int, int],
    say: Callable[[str], None],
) -> Comparison:
    """Compare two variants. Each round visits both with the same prompts, in alternating order; round 0 does
    not count.
    """
    first, second = scenario.variants(scale)
    results: dict[str, list[MeasuredRun]] = {first.name: [], second.name: []}
    try:
        for variant in (first, second):
            await _load(admin, model, scenario, variant)
        for number in range(rounds + 1):
            order = (first, second) if number % 2 else (second, first)
            for variant in order:
                work = scenario.workload(Prompts(f"{scenario.name}/{number}", id_range), scale)
                target = BenchTarget(url, _alias(scenario, variant))
                result = await _observed(admin, target, work)
                if number:
                    results[variant.name].append(result)
            say(f"{scenario.name}: round {number} of {rounds}" + ("" if number else " (warm-up)"))
    finally:
        for variant in (first, second):
            with suppress(Exception):  # the failure has been raised already
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


async def _load(admin: Client, model: str, scenario: Scenario, variant: Variant) -> None:
    """Load a variant. It is a second engine on the same files: a directory under an alias is a model of its
    own.
    """
    name = _alias(scenario, variant)
    body = {"model": model, "alias": name, "options": variant.options}
    await asyncio.to_thread(admin.post, "/admin/api/models/load", body)
    while (state := await asyncio.to_thread(_state, admin, name))[0] != "ready":
        if state[0] == "failed":
            raise CliError(f"{name} could not be loaded", state[1], "a smaller --scale, or another model")
        await asyncio.sleep(0.1)


def _state(admin: Client, name: str) -> tuple[str, str]:
    found = (m for m in admin.get("/admin/api/models")["models"] if m["name"] == name)
    return next(((m["state"], m["cause"]) for m in found), ("failed", "it is gone"))


async def _observed(admin: Client, target: BenchTarget, work: Any) -> MeasuredRun:
    stats: list[dict[str, Any]] = []
    sampler = asyncio.create_task(_sample(admin, target.model, stats))
    try:
        return MeasuredRun(await run(target, work), stats)
    finally:
        sampler.cancel()


async def _sample(admin: Client, model: str, into: list[dict[str, Any]]) -> None:
    while True:
        answer = await asyncio.to_thread(admin.get, "/admin/api/stats")
        into.extend(m["stats"] for m in answer["models"] if m["name"] == model and m["stats"]["running"])
        await asyncio.sleep(_SAMPLE_EVERY_S)


def _figure(read: Figure, first: list[MeasuredRun], second: list[MeasuredRun]) -> tuple[float, float, Ratio]:
    a = [read(r) or float("nan") for r in first]
    b = [read(r) or float("nan") for r in second]
    return statistics.median(a), statistics.median(b), ratio(b, a)
