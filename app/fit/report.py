"""Text of a fit, for the command line and the dashboard."""

import time
from collections.abc import Iterator

from llmbox.engine.planning.estimator import MemoryPlan

from ..util.formatting import experts_whole, no_kv_cache, rate_range, size, span
from .bandwidth import Bandwidth
from .capacity import money
from .fit import SUSTAINED, Fit, Speed
from .gpu_prediction import GpuPrediction


def verdict(result: Fit) -> str:
    return f"{result.name} {'fits' if result.fits else 'does not fit'} on {result.device}."


def fit_rows(result: Fit) -> dict[str, str]:
    """Return what the model needs, what is available, and what would help, by name."""
    rows: dict[str, str] = {}
    if result.reason:
        rows["why"] = result.reason
    if (plan := result.plan) is not None:
        rows |= plan_rows(plan)
    rows["budget"] = f"{size(result.budget)} ({size(result.available)} free now)"
    rows["disk"] = (
        f"{size(result.disk_need)} to fetch, {size(result.disk_free)} free"
        if result.disk_need
        else "all here"
    )
    if result.kv_disk_tokens:
        text = f"{size(result.kv_disk_bytes)} for all models, {result.kv_disk_tokens:,} tokens of this one"
        rows["KV on disk"] = text
    if result.speed is not None:
        rows |= _speed_rows(result.speed)
    return rows


def plan_rows(plan: MemoryPlan) -> dict[str, str]:
    """Return what a plan takes and what it holds, by name."""
    whole = experts_whole(plan.expert_parallel, plan.redundant_experts)
    each = f" on each of {plan.ranks} ranks (tp {plan.tp}, pp {plan.pp}{whole})" if plan.ranks > 1 else ""
    weights = plan.dtype if plan.quant == "none" else f"{plan.quant}, {plan.dtype} beside them"
    token = size(plan.kv_bytes_per_token)
    return {
        "weights": f"{size(plan.weights_bytes)} as {weights}",
        "workspace": size(plan.workspace_bytes),
        "KV cache": (
            f"{size(plan.kv_bytes)}, {token} a token as {plan.kv_dtype}"
            if plan.kv_bytes
            else no_kv_cache(has_state=plan.state_slots > 0)
        ),
        **({"state": _states(plan)} if plan.state_slots else {}),
        **({"disk buffers": size(plan.buffer_bytes)} if plan.buffer_bytes else {}),
        **({"experts": _experts(plan)} if plan.expert_bytes else {}),
        **({"main memory": _host_tier(plan)} if plan.host_bytes else {}),
        "together": size(plan.total_bytes) + each,
        "context": f"{plan.context} tokens",
        "at once": f"{round(plan.max_concurrency, 1):g} requests of full context, {plan.max_running} at most",
    }


def _experts(plan: MemoryPlan) -> str:
    form = plan.dtype if plan.expert_quant == "none" else plan.expert_quant
    return f"{size(plan.expert_bytes)} of main memory as {form}, which the CPU computes"


def _host_tier(plan: MemoryPlan) -> str:
    tokens = plan.host_bytes // plan.kv_bytes_per_token
    return f"at most {size(plan.host_bytes)} for KV blocks that the GPU evicts, {tokens:,} tokens"


def _states(plan: MemoryPlan) -> str:
    return f"{size(plan.state_bytes)}, recurrent: {plan.state_slots} slots of {size(plan.slot_bytes)}"


def _speed_rows(speed: Speed) -> Iterator[tuple[str, str]]:
    one, many = f"{rate_range(*speed.one_stream)} tok/s for one stream", rate_range(*speed.all_streams)
    yield "speed", one + (f", {many} for {speed.streams}" if speed.streams > 1 else "")
    memory, share = speed.bandwidth, f"{SUSTAINED:.0%}"
    if memory.probed_at is None:
        yield "memory", f"{size(memory.best)}/s; the speed is that of {share} to all of it"
    else:
        yield "memory", f"{_probed(memory)}; the speed is that of {share} of the first to all of the second"
    if speed.host is not None:
        read = f"a token of one stream reads {size(speed.host_read)} of main memory"
        copies = "copies between the GPU and main memory are not counted"
        yield "experts at", f"{read}, which {_probed(speed.host)}; {copies}"
    if speed.sums_bytes:
        yield "scaling", f"{speed.scaling:.2f} times one rank; each sends {size(speed.sums_bytes)} a token"


def _probed(memory: Bandwidth) -> str:
    when = time.strftime("%Y-%m-%d", time.localtime(memory.probed_at))
    busy = " while the machine was busy" if memory.was_busy else ""
    return f"reads {size(memory.typical)}/s as a rule and {size(memory.best)}/s at best, probed {when}{busy}"


def prediction_rows(found: GpuPrediction) -> dict[str, str]:
    """Return the data sheet of a GPU, the plan of a model on it, and its predicted speed, by name."""
    gpu = found.gpu
    rows = {
        "card": (
            f"{gpu.memory_gib} GiB, {size(gpu.bandwidth)}/s, {gpu.float16:g} TFLOP/s in bfloat16, "
            f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        )
    }
    if found.reason:
        rows["why"] = found.reason
    if found.plan is not None:
        rows |= plan_rows(found.plan)
    rows["budget"] = f"{size(found.budget)} on each card"
    if (speed := found.speed) is None:
        return rows
    load = speed.load
    tokens = f"{load.prompt} + {load.output} tokens"
    rows["batch"] = f"{speed.streams} streams of {tokens} at once"
    rows["speed"] = f"{speed.one_stream:,.0f} tok/s for one stream, {speed.all_streams:,.0f} for the batch"
    rows["prompts"] = (
        f"{speed.prompt:,.0f} tok/s, the first token of {load.prompt} after {span(speed.first_token)}"
    )
    if found.price is not None and speed.prompt_price is not None and speed.output_price is not None:
        cards = f"{found.cards} x {found.price:g}" if found.cards > 1 else f"{found.price:g}"
        rows["price"] = (
            f"{cards} an hour: {money(speed.prompt_price)} a million prompt tokens, "
            f"{money(speed.output_price)} a million output tokens of the batch"
        )
    return rows


PREDICTED = (
    f"speeds are predicted from data sheets, not measured: {SUSTAINED:.0%} of the bandwidth or of the "
    "products a second, whichever takes longer. Launching kernels is not counted, which small models wait for"
)
