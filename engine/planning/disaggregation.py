"""Disaggregated prefill and decoding: what is refused, and how the prefill engine is configured."""

from dataclasses import replace
from typing import Final

from ..config import EngineConfig, PrefillRole
from ..errors import ParallelError
from ..model_config.shape import ModelShape
from .memory_plan import MemoryPlan

PREFILL_RUNNING: Final = 4
"""Prompts that a prefill engine computes at once: short ones need not wait for the end of a long one."""


def check_disaggregation(config: EngineConfig, shape: ModelShape, device: str, cores: int) -> None:
    """Raise ParallelError, with the reason, where a model cannot run as a pair of engines."""
    if config.disaggregate is None:
        return
    prefill, decode = config.disaggregate
    reason = find_obstacle(config, device, is_encoder=shape.is_bidirectional)
    if not reason and prefill + decode > cores:
        have = f"{cores} core{'s' * (cores > 1)}"
        reason = f"needs {prefill + decode} cores, and this process may use {have}: ask for fewer"
    elif not reason and config.threads not in {None, prefill + decode}:
        reason = f"says how many threads each engine has: leave out --threads {config.threads}"
    if reason:
        raise ParallelError(f"--disaggregate {prefill}:{decode} {reason}")


def find_obstacle(config: EngineConfig, device: str, *, is_encoder: bool) -> str:
    """Return the reason why a model with these options cannot run as any pair of engines; empty if it can."""
    others = {
        f"--tp {config.tp}": (config.tp or 1) > 1,
        f"--pp {config.pp}": (config.pp or 1) > 1,
        "--batching static": config.batching == "static",
        "--no-prefix-cache": not config.prefix_cache,
        "--no-chunked-prefill": not config.chunked_prefill,
        "--draft": config.draft_path is not None or config.mtp == "on",
    }
    if device != "cpu":
        return "runs on CPUs only: leave it out, or use --device cpu"
    if is_encoder:
        return "is for models that generate text, and this one is an encoder: leave it out"
    clash = next((name for name, is_set in others.items() if is_set), "")
    return f"does not work with {clash}: leave one of them out" if clash else ""


def decode_config(config: EngineConfig) -> EngineConfig:
    """Return the options of the decode engine. A layer for multi-token prediction has keys and values of its
    own, which a prefill engine does not compute.
    """
    assert config.disaggregate is not None
    return replace(config, threads=config.disaggregate[1], mtp="off")


def describe_pair(sizes: tuple[int, int] | None) -> str:
    assert sizes is not None
    prefill, decode = (f"{size} core{'s' * (size > 1)}" for size in sizes)
    return (
        f"prompts are computed on {prefill}, tokens on {decode}; the plan has weights, KV of one context and "
        "64 MiB of shared memory for the prefill engine"
    )


def prefill_config(
    config: EngineConfig, plan: MemoryPlan, segment: int, cores: tuple[int, ...]
) -> EngineConfig:
    """Return the options of the prefill engine of a decode engine with this plan."""
    return replace(
        config,
        name=f"{config.name} (prefill)",
        device="cpu",
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        quant=plan.quant,
        context=plan.context,
        kv_tokens=plan.context,
        max_running=min(PREFILL_RUNNING, plan.max_running),
        token_budget=max(plan.token_budget, PREFILL_RUNNING),
        memory_bytes=plan.weights_bytes + plan.prefill_bytes,
        threads=len(cores),
        disaggregate=None,
        prefill_role=PrefillRole(segment=segment, cores=cores),
        speculate="off",
        mtp="off",
    )
