"""transformers on the same kinds of random models: `generate` as it comes, and its continuous batching."""

import time
from typing import Any

import torch

from gpu.report import Report
from gpu.shapes import SHAPES, parameters

REQUESTS, PROMPT, OUTPUT = 64, 512, 64
"""Of the load that continuous batching and our engine both get."""


def generate(report: Report) -> None:
    report.section("transformers' generate beside it (bf16, SDPA)")
    report.table("work", "figure")
    for size in ("0.6B", "8B"):
        if (model := random_model(report, size)) is None:
            continue
        for batch in (1, 8):
            ids = torch.randint(3, 1000, (batch, PROMPT), device="cuda")
            spent = [seconds_of(model, ids, new) for new in (1, 1, 33)]
            step = (spent[2] - spent[1]) / 32
            figure = f"{batch / step:.0f} tok/s, {step * 1e3:.1f} ms a step"
            report.row((f"{size}, decode {batch} x {PROMPT}", figure))
        del model
        torch.cuda.empty_cache()


def seconds_of(model: Any, ids: torch.Tensor, new: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    torch.cuda.synchronize()
    return time.perf_counter() - started


def continuous_batching(report: Report) -> None:
    """Whatever it does, it is no failure of ours; a section of its own, as it may never come back."""
    report.section("transformers' continuous batching beside it (bf16)")
    report.table("work", "figure")
    for size in ("0.6B", "8B"):
        if (model := random_model(report, size)) is None:
            continue
        what = f"{size}, {REQUESTS} requests of {PROMPT} in, {OUTPUT} out"
        report.row((what, batched_figure(model, REQUESTS, PROMPT, OUTPUT)))
        del model
        torch.cuda.empty_cache()


def batched_figure(model: Any, requests: int, prompt: int, output: int) -> str:
    """Tokens a second, or why there are none."""
    if not hasattr(model, "generate_batch"):
        return "this version of transformers does not offer it"
    try:
        batched(model, 2, prompt, 4)  # what is compiled or captured first
        started = time.perf_counter()
        tokens = batched(model, requests, prompt, output)
        took = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 - it changes from version to version
        return f"not available: {type(error).__name__}: {str(error)[:100]}"
    wanted = requests * output
    return f"{tokens / took:.0f} tok/s" if tokens == wanted else f"gave {tokens} of {wanted} tokens"


def batched(model: Any, requests: int, prompt: int, output: int) -> int:
    """Tokens that came."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    inputs = torch.randint(3, 1000, (requests, prompt)).tolist()
    results = model.generate_batch(inputs, generation_config=config)
    return sum(len(result.generated_tokens) for result in results.values())


def random_model(report: Report, size: str) -> Any | None:
    """None where time or memory is short, which the report then says."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    if report.left < 15 or 2.6 * parameters(SHAPES[size]) > torch.cuda.mem_get_info()[0]:
        report.say(f"\n{size}: out of time or memory.")
        return None
    named = {"torch_dtype", "architectures", "model_type"}
    shape = {key: value for key, value in SHAPES[size].items() if key not in named}
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.bfloat16).eval()
