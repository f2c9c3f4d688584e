"""Text of a fit, for the command line and the dashboard."""

import time
from collections.abc import Iterator

from llmbox.engine.planning.estimator import MemoryPlan

from ..util.formatting import rate_range, size
from .fit import SUSTAINED, Fit, Speed


def verdict(result: Fit) -> str:
    return f"{result.name} {'fits' if result.fits else 'does not fit'} on {result.device}."


def fit_rows(result: Fit) -> dict[str, str]:
    """Return what the model needs, what is available, and what would help, by name."""
    rows: dict[str, str] = {}
    if result.reason:
        rows["why"] = result.reason
    if (plan := result.plan) is not None:
        each = f" on each of {plan.ranks} ranks (tp {plan.tp}, pp {plan.pp})" if plan.ranks > 1 else ""
        weights = plan.dtype if plan.quant == "none" else f"{plan.quant}, {plan.dtype} beside them"
        token = size(plan.kv_bytes_per_token)
        rows |= {
            "weights": f"{size(plan.weights_bytes)} as {weights}",
            "workspace": size(plan.workspace_bytes),
            "KV cache": (
                f"{size(plan.kv_bytes)}, {token} a token as {plan.kv_dtype}"
                if plan.kv_bytes
                else "none: each text is computed at once"
            ),
            **({"state": _states(plan)} if plan.state_slots else {}),
            **({"disk buffers": size(plan.buffer_bytes)} if plan.buffer_bytes else {}),
            "together": size(plan.total_bytes) + each,
            "context": f"{plan.context} tokens",
            "at once": f"{plan.max_concurrency:.1f} requests of full context, {plan.max_running} at most",
        }
    rows["budget"] = f"{size(result.budget)} ({size(result.available)} free now)"
    rows["disk"] = (
        f"{size(result.disk_need)} to fetch, {size(result.disk_free)} free"
        if result.disk_need
        else "all here"
    )
    if result.kv_disk_tokens:
        told = f"{size(result.kv_disk_bytes)} for all models, {result.kv_disk_tokens:,} tokens of this one"
        rows["KV on disk"] = told
    if result.speed is not None:
        rows |= _speed_rows(result.speed)
    return rows


def _states(plan: MemoryPlan) -> str:
    return f"{size(plan.state_bytes)}, recurrent: {plan.state_slots} slots of {size(plan.slot_bytes)}"


def _speed_rows(speed: Speed) -> Iterator[tuple[str, str]]:
    one, many = f"{rate_range(*speed.one_stream)} tok/s for one stream", rate_range(*speed.all_streams)
    yield "speed", one + (f", {many} for {speed.streams}" if speed.streams > 1 else "")
    memory, share = speed.bandwidth, f"{SUSTAINED:.0%}"
    if memory.probed_at is None:
        yield "memory", f"{size(memory.best)}/s; the speed is that of {share} to all of it"
    else:
        when = time.strftime("%Y-%m-%d", time.localtime(memory.probed_at))
        read = f"reads {size(memory.typical)}/s as a rule and {size(memory.best)}/s at best, probed {when}"
        read += " while the machine was busy" if memory.was_busy else ""
        yield "memory", f"{read}; the speed is that of {share} of the first to all of the second"
    if speed.sums_bytes:
        yield "scaling", f"{speed.scaling:.2f} times one rank; each sends {size(speed.sums_bytes)} a token"
