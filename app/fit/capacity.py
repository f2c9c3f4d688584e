"""Capacity plan: how many GPUs a number of users needs, and what their tokens cost.

An engine under steady load runs as many requests as memory and the target for time per output token (TPOT)
allow. A step gives each of its streams one token, and in the same time the prompts of new requests come in:

    TPOT            = seconds of a step + streams · prompt / output · seconds of a prompt token
    requests/s      = streams / (output · TPOT)
    engines         = users · requests/s of a user / requests/s of an engine, rounded up
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from ..util.formatting import size, span
from .fit import SUSTAINED
from .gpu_prediction import (
    GpuPrediction,
    RequestSize,
    StepCost,
    StepTimes,
    million_price,
    request_bytes,
    requests_held,
    streams_in_memory,
)

_ROUNDING = 1e-9
"""Part of an engine that is rounding, not load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoad:
    """Users that are served together; each asks by itself, evenly over time."""

    users: int
    per_minute: float
    """Requests of one user a minute."""
    request: RequestSize
    tpot_target: float | None = None
    """Most seconds for an output token; None: as many streams as memory holds."""

    @property
    def per_second(self) -> float:
        """Requests of all users a second."""
        return self.users * self.per_minute / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Arithmetic from a load to GPUs and prices; see the module. Seconds, bytes of one card."""

    load: UserLoad
    kv_per_user: int
    """KV and recurrent state of one request."""
    streams_in_memory: int
    streams: int
    """Requests of an engine at once, within memory and target; 0: not even one is within the target."""
    requests_held: int
    """Requests that the KV cache has room for, more than `streams_in_memory` where these are limited."""
    step: float
    """Decoding step of all streams."""
    step_cost: StepCost
    prompts: float
    """Prompt tokens that come with each step."""
    prompt: float
    """Seconds of these."""
    first_token: float
    """Seconds of a prompt on an idle engine."""
    engine_per_second: float
    """Requests that an engine completes a second."""
    engines: int
    cards: int
    hourly: float | None
    """Price of all cards an hour."""
    token_price: float | None
    """Price of a million tokens, of prompts and outputs together."""
    output_price: float | None
    """The same price by output tokens alone."""

    @property
    def tpot(self) -> float:
        return self.step + self.prompt

    @property
    def is_within_target(self) -> bool:
        return self.streams > 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tpot": self.tpot, "within_target": self.is_within_target}


def plan_capacity(found: GpuPrediction, load: UserLoad) -> CapacityPlan:
    """Return the GPUs that a load needs. `found` must have a speed."""
    times, request = found.times, load.request
    assert times is not None
    held = streams_in_memory(times.plan, request)
    streams = _most_streams(times, load, held)
    measured = max(1, streams)
    step, prompt = _parts_of_tpot(times, request, measured)
    engine = streams / (request.output * (step + prompt))
    engines = max(1, ceil(load.per_second / engine - _ROUNDING)) if streams else 0
    cards = engines * found.cards
    hourly = None if found.price is None or not streams else found.price * cards
    per_token = per_output = None
    if hourly is not None:
        per_token = million_price(hourly, load.per_second * request.tokens)
        per_output = million_price(hourly, load.per_second * request.output)
    return CapacityPlan(
        load=load,
        kv_per_user=request_bytes(times.plan, request),
        streams_in_memory=held,
        streams=streams,
        requests_held=requests_held(times.plan, request),
        step=step,
        step_cost=times.decode_cost(measured, request),
        prompts=measured * request.prompt / request.output,
        prompt=prompt,
        first_token=times.first_token(request),
        engine_per_second=engine,
        engines=engines,
        cards=cards,
        hourly=hourly,
        token_price=per_token,
        output_price=per_output,
    )


def _parts_of_tpot(times: StepTimes, request: RequestSize, streams: int) -> tuple[float, float]:
    """Return the seconds of a decoding step, and of the prompts that come with it."""
    prompts = streams * request.prompt / request.output
    return times.decode(streams, request), prompts * times.prompt_token(request)


def _most_streams(times: StepTimes, load: UserLoad, held: int) -> int:
    """Return the most streams within the target: the time of a token grows with them."""
    if load.tpot_target is None:
        return held
    low, high = 0, held
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_parts_of_tpot(times, load.request, middle)) <= load.tpot_target:
            low = middle
        else:
            high = middle - 1
    return low


def capacity_rows(found: GpuPrediction, plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    """Yield the arithmetic, line by line."""
    yield from _memory_rows(found, plan)
    yield from _time_rows(found, plan)
    if plan.is_within_target:
        yield from _engine_rows(found, plan)
    else:
        yield "engines", "none: one stream alone is beyond the target"


def _memory_rows(found: GpuPrediction, plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    request, memory = plan.load.request, found.plan
    assert memory is not None
    each = f" on each of {found.cards} cards" if found.cards > 1 else ""
    beside = f" and {size(memory.slot_bytes)} of state" if memory.slot_bytes else ""
    token = f"{size(memory.kv_bytes_per_token)} a token{beside}"
    blocks = f"{request.prompt} + {request.output} tokens in blocks of {memory.block_size}"
    yield "KV a user", f"{blocks}, {token} = {size(plan.kv_per_user)}{each}"
    held = f"{size(memory.kv_bytes)} of KV hold {plan.requests_held} requests"
    most = "" if plan.requests_held <= memory.max_running else f", {memory.max_running} run (--max-running)"
    yield "in memory", held + most
    if 0 < plan.streams < plan.streams_in_memory:
        yield "in target", f"{plan.streams} streams: one more is beyond the target"


def _time_rows(found: GpuPrediction, plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    load, request, cost = plan.load, plan.load.request, plan.step_cost
    shown = max(1, plan.streams)
    read = (
        f"{size(cost.read)} at {SUSTAINED:.0%} of {size(found.gpu.bandwidth)}/s take {_short(cost.reading)}"
    )
    exchange = f", exchange {_short(cost.exchange)}" if cost.exchange else ""
    streams = f"{shown} streams" if shown > 1 else "1 stream"
    yield "step", f"{streams}: {read}, products {_short(cost.products)}{exchange}: {_short(plan.step)}"
    count = f"{shown} x {request.prompt} / {request.output} = {_count(plan.prompts)} tokens of prompts"
    yield "prompts", f"{count} come with a step: {_short(plan.prompt)}"
    target = "no target" if load.tpot_target is None else f"target {_short(load.tpot_target)}"
    yield "TPOT", f"{_short(plan.step)} + {_short(plan.prompt)} = {_short(plan.tpot)} ({target})"
    yield "TTFT", f"{_short(plan.first_token)} for {request.prompt} tokens on an idle engine"


def _engine_rows(found: GpuPrediction, plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    load, request = plan.load, plan.load.request
    rate = f"{plan.streams} / ({request.output} x {_short(plan.tpot)})"
    yield "an engine", f"{rate} = {plan.engine_per_second:.2f} requests/s"
    yield "load", f"{load.users} users x {load.per_minute:g} a minute = {load.per_second:.2f} requests/s"
    ratio = load.per_second / plan.engine_per_second
    cards = f", each of {found.cards} cards: {plan.cards}" if found.cards > 1 else ""
    quotient = f"{load.per_second:.2f} / {plan.engine_per_second:.2f} = {ratio:.2f}"
    yield "engines", f"{quotient}, so {plan.engines}{cards}"
    if found.price is None or plan.hourly is None or plan.token_price is None or plan.output_price is None:
        return
    tokens = load.per_second * 3600 * request.tokens
    hourly = (
        f"{plan.cards} x {found.price:g} = {plan.hourly:g} an hour for {tokens / 1e6:,.2f} million tokens"
    )
    output = f"{money(plan.output_price)} if outputs alone are counted"
    yield "price", f"{hourly}: {money(plan.token_price)} a million, {output}"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.3g}"


def _short(seconds: float) -> str:
    """Format a short time with three digits at least."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else span(seconds)


def wait_warning(plan: CapacityPlan) -> str:
    """Return a sentence if users cannot ask as often as the load says; else empty."""
    seconds = plan.first_token + plan.load.request.output * plan.tpot
    if not plan.is_within_target or plan.load.per_minute * seconds <= 60:
        return ""
    return (
        f"an answer takes {span(seconds)}: a user who waits for it cannot ask {plan.load.per_minute:g} times "
        "a minute"
    )


def money(amount: float) -> str:
    """Format a price with three significant digits at least, without a currency."""
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"
