"""Prediction for GPUs that are not here: memory plan, speed and price of a model, by data sheets.

A step takes as long as reading its bytes or computing its products, whichever is longer, and the exchange
between ranks; `SUSTAINED` of the data sheet's rates are counted, as `llmbox fit` does for a GPU that is here.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.gpus import GpuModel
from llmbox.engine.hardware.machine import make_gpu_machine
from llmbox.engine.model_config.config import ModelConfig
from llmbox.engine.model_config.shape import ModelShape
from llmbox.engine.planning.estimator import MemoryPlan, show_bytes
from llmbox.engine.planning.performance_model import (
    RankLink,
    exchange_seconds,
    rank_shape,
    step_bytes,
    step_flops,
)
from llmbox.kernels.quant_formats import QUANTS

from ..engines.eviction import total_budget
from .fit import SUSTAINED, alternatives, link_of, plan_within_budget

_HOUR, _MILLION = 3600.0, 1e6
_MOST_CARDS = (2, 4, 8)
"""Cards in a box that are tried where one is too small."""


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of a typical request: prompt and output."""

    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def within(self, context: int) -> "RequestSize":
        """Return a request of the same proportion that a shorter context holds."""
        if self.tokens <= context:
            return self
        output = max(1, self.output * context // self.tokens)
        return RequestSize(max(1, context - output), output)


USUAL_REQUEST = RequestSize(1024, 256)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Expected seconds of the steps of one engine, on all its ranks."""

    shape: ModelShape
    plan: MemoryPlan
    gpu: GpuModel
    link: RankLink

    def cost(self, rows: int, context: int, *, prompt: bool = False) -> "StepCost":
        """Return the cost of a step of `rows` tokens: of one prompt's, or of a stream each."""
        plan, quant = self.plan, QUANTS.get(self.plan.quant)
        part = rank_shape(self.shape, plan.tp, 1, expert_parallel=plan.expert_parallel)
        seen = 0 if prompt else context  # a prompt's earlier tokens are read once, not for each row
        read = step_bytes(part, plan.dtype, plan.kv_dtype, rows=rows, context=seen, quant=quant)
        flops = step_flops(self.shape, rows=rows, context=context, logits=not prompt) / plan.tp
        exchange = exchange_seconds(self.shape, plan, self.link, rows=rows)
        return StepCost(
            read=read,
            reading=read / self.gpu.bandwidth / SUSTAINED,
            products=flops / self.gpu.flops(_product_numbers(plan)) / SUSTAINED,
            exchange=sum(exchange),
        )

    def decode_cost(self, streams: int, load: RequestSize) -> "StepCost":
        """Return the cost of a token of each of `streams`, halfway through their outputs."""
        return self.cost(streams, load.prompt + load.output // 2)

    def decode(self, streams: int, load: RequestSize) -> float:
        """Return the seconds of such a step."""
        return self.decode_cost(streams, load).seconds

    def prompt_token(self, load: RequestSize) -> float:
        """Return the seconds of a token of prompts that fill each step."""
        rows = self.plan.step_tokens
        return self._prompt_step(rows, load) / rows

    def first_token(self, load: RequestSize) -> float:
        """Return the seconds of a prompt on an idle engine."""
        rows = self.plan.step_tokens
        whole, rest = divmod(load.prompt, rows)
        seconds = whole * self._prompt_step(rows, load)
        return seconds + (self._prompt_step(rest, load) if rest else 0.0)

    def _prompt_step(self, rows: int, load: RequestSize) -> float:
        return self.cost(rows, load.prompt // 2, prompt=True).seconds


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step on one rank, in bytes and seconds."""

    read: float
    """Bytes of weights, KV and recurrent state."""
    reading: float
    products: float
    exchange: float
    """Seconds of sums over ranks, and between stages."""

    @property
    def seconds(self) -> float:
        """Seconds of the step: reading and products overlap."""
        return max(self.reading, self.products) + self.exchange


def _product_numbers(plan: MemoryPlan) -> str:
    """Return the numbers that linears multiply: formats of weights alone are widened first."""
    quant = QUANTS.get(plan.quant)
    if quant is None or quant.kind == "integer":
        return plan.dtype
    return "int8" if quant.kind == "rows" else "float8"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeed:
    """Tokens a second, prices a million tokens, and the batch that they hold for."""

    load: RequestSize
    streams: int
    """Requests that decode together: as many as memory holds and the plan allows."""
    one_stream: float
    all_streams: float
    prompt: float
    first_token: float
    """Seconds of a prompt on an idle engine."""
    prompt_price: float | None = None
    """Price of a million prompt tokens where nothing else runs; None: no price is given."""
    output_price: float | None = None
    """Price of a million output tokens of all streams together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrediction:
    """Memory plan, speed and price of a model on one GPU model, or on several of them as ranks."""

    gpu: GpuModel
    budget: int
    """Bytes that models may take on each card."""
    plan: MemoryPlan | None
    reason: str
    """Reason why it does not fit; empty when it fits."""
    remedies: tuple[str, ...]
    price: float | None
    """Price of one card an hour."""
    speed: PredictedSpeed | None
    times: StepTimes | None

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def cards(self) -> int:
        """Cards of one engine."""
        return 1 if self.plan is None else self.plan.ranks

    def as_dict(self) -> dict[str, Any]:
        gpu, plan = self.gpu, self.plan
        return {
            "gpu": gpu.name,
            "title": gpu.title,
            "memory": gpu.memory,
            "bandwidth": gpu.bandwidth,
            "capability": list(gpu.capability),
            "budget": self.budget,
            "fits": self.fits,
            "reason": self.reason,
            "remedies": list(self.remedies),
            "price_per_hour": self.price,
            "cards": self.cards,
            "sustained": SUSTAINED,
            "plan": plan and {**asdict(plan), "kv_bytes": plan.kv_bytes, "total_bytes": plan.total_bytes},
            "speed": self.speed and asdict(self.speed),
        }


def predict(
    config: ModelConfig,
    gpu: GpuModel,
    engine: EngineConfig,
    *,
    load: RequestSize | None = None,
    price: float | None = None,
) -> GpuPrediction:
    """Plan a model on a GPU model that is not here, with as many cards as `engine` asks ranks for, else one.

    `load`: the tokens of a request; None takes `USUAL_REQUEST`, or less where the context is shorter.
    `price`: of one card an hour. Experts are on the cards: of the box's main memory nothing is known.
    """
    engine = replace(engine, device="cuda", cpu_experts="off")
    machine = make_gpu_machine(gpu, (engine.tp or 1) * (engine.pp or 1))
    budget = total_budget(machine, "cuda", None)
    plan, reason = plan_within_budget(config, machine, "cuda", budget, engine)
    remedies: tuple[str, ...] = ()
    if plan is None:
        remedies = alternatives(config, machine, "cuda", budget, engine) + _more_cards(config, gpu, engine)
    elif load is not None and load.tokens > plan.context:
        reason = (
            f"a prompt of {load.prompt} and {load.output} tokens of output are {load.tokens}, more than the "
            f"context of {plan.context} tokens"
        )
        if plan.is_lowered:
            reason += ", which memory allows: try --quant int8, --kv-dtype int8 or --tp 2"
        plan = None
    speed = times = None
    if plan is not None and not config.is_bidirectional:
        link = link_of(plan, machine, gpu.bandwidth)
        times = StepTimes(config.shape(), plan, gpu, link)
        speed = _predict_speed(times, load or USUAL_REQUEST.within(plan.context), price)
    return GpuPrediction(
        gpu=gpu,
        budget=budget,
        plan=plan,
        reason=reason,
        remedies=remedies,
        price=price,
        speed=speed,
        times=times,
    )


def _more_cards(config: ModelConfig, gpu: GpuModel, engine: EngineConfig) -> tuple[str, ...]:
    """Return the fewest cards on which a model fits that one card does not hold."""
    if engine.tp is not None or engine.pp is not None:
        return ()
    for count in _MOST_CARDS:
        machine = make_gpu_machine(gpu, count)
        more = replace(engine, tp=count)
        plan, _ = plan_within_budget(config, machine, "cuda", total_budget(machine, "cuda", None), more)
        if plan is not None:
            size = show_bytes(plan.total_bytes)
            return (f"--tp {count}: {size} on each of {count} with a context of {plan.context} tokens",)
    return ()


def _predict_speed(times: StepTimes, load: RequestSize, price: float | None) -> PredictedSpeed:
    streams = streams_in_memory(times.plan, load)
    output = streams / times.decode(streams, load)
    prompt = 1 / times.prompt_token(load)
    hourly = None if price is None else price * times.plan.ranks
    return PredictedSpeed(
        load=load,
        streams=streams,
        one_stream=1 / times.decode(1, load),
        all_streams=output,
        prompt=prompt,
        first_token=times.first_token(load),
        prompt_price=None if hourly is None else million_price(hourly, prompt),
        output_price=None if hourly is None else million_price(hourly, output),
    )


def million_price(hourly: float, rate: float) -> float:
    """Return the price of a million tokens at `rate` tokens a second."""
    return hourly / _HOUR / rate * _MILLION


def request_bytes(plan: MemoryPlan, load: RequestSize) -> int:
    """Return the bytes that one request takes of a rank: KV in whole blocks, and recurrent state."""
    blocks = -(-load.tokens // plan.block_size)
    window = min(blocks, plan.running_window_blocks) * plan.window_bytes_per_token
    return plan.block_size * (blocks * plan.kv_bytes_per_token + window) + plan.slot_bytes


def streams_in_memory(plan: MemoryPlan, load: RequestSize) -> int:
    """Return how many requests the KV cache holds at once, at least 1 and at most `max_running`."""
    return max(1, min(requests_held(plan, load), plan.max_running))


def requests_held(plan: MemoryPlan, load: RequestSize) -> int:
    """Return how many requests the KV cache has room for. Sliding windows have it for `max_running`."""
    return plan.num_blocks // -(-load.tokens // plan.block_size)
