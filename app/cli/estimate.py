"""`llmbox load --estimate-only`: the engine's own arithmetic, without starting one."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit, EngineError
from llmbox.engine.estimator import MemoryBudget, estimate
from llmbox.engine.machine import read_machine
from llmbox.engine.model_config import parse_config

from ..errors import CliError, Exit
from . import output


def print_estimate(config: EngineConfig, *, as_json: bool) -> None:
    machine = read_machine()
    device: Literal["cpu", "cuda"] = "cuda" if config.device == "cuda" or machine.gpus else "cpu"
    if config.device != "auto":
        device = config.device
    if device == "cuda" and not machine.gpus:
        raise CliError("no GPU can be used", machine.no_gpu_reason or "none is visible", "--device cpu")
    try:
        shape = parse_config(Path(config.model_path)).shape()
        plan = estimate(shape, MemoryBudget.of(machine, device), config)
    except DoesNotFit as error:
        raise CliError(
            f"{config.name} does not fit",
            str(error),
            "a smaller --ctx, or a larger --memory",
            Exit.DOES_NOT_FIT,
        ) from error
    except EngineError as error:
        raise CliError(f"cannot estimate {config.name}", str(error), "llmbox ls") from error
    if as_json:
        output.write_json("estimate", {"name": config.name, "fits": True, **asdict(plan)})
        return
    rows = {
        "device": f"{plan.device} as {plan.dtype}, KV as {plan.kv_dtype}",
        "weights": output.size(plan.weights_bytes),
        "workspace": output.size(plan.workspace_bytes),
        "KV cache": f"{output.size(plan.kv_bytes)}, {output.size(plan.kv_bytes_per_token)} a token",
        "of a budget": output.size(plan.budget_bytes),
        "context": f"{plan.context} tokens",
        "at once": f"{plan.max_running} requests",
    }
    for name, value in rows.items():
        output.write(f"{name:12} {value}")
    for note in plan.notes:
        output.say(f"Note: {note}")
