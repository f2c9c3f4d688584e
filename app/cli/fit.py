"""`llmbox fit`: the engine's arithmetic before anything is downloaded. `load --estimate-only` is the same."""

from collections.abc import Callable
from typing import Any

import click

from llmbox.engine.config import EngineConfig
from llmbox.engine.estimator import MemoryPlan
from llmbox.engine.machine import Machine, read_machine
from llmbox.engine.model_config import ModelConfig

from ..catalog import hub_cache
from ..control.facts import find_facts
from ..control.model_request import ModelRequest
from ..engines.budget import device_of, total_budget
from ..errors import CliError, Exit
from ..hub.facts import Facts
from ..hub.fit import Fit, device_bandwidth, planned
from ..hub.fit import fit as check_fit
from . import output
from .lazy import Command
from .options import given, setting_options
from .program import Program, pass_program

FLAGS = (
    *("device", "dtype", "kv_dtype", "quant", "ctx", "max_running", "token_budget", "memory", "tp", "pp"),
    "threads",
)


@click.command(cls=Command)
@click.argument("model")
@setting_options(*(f"model.{name}" for name in FLAGS))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def fit(program: Program, /, model: str, *, as_json: bool, **flags: Any) -> int:
    """Say whether MODEL fits on this machine, with what context and how fast; exit 5 if it does not.

    MODEL is on disk or on the hub; of the latter only its config and the headers of its weights are read.
    """
    values = {name: value for name, value in given(flags).items() if name.startswith("model.")}
    facts, ref = find_facts(model, program.environ, program.names, program.in_memory())
    settings = program.settings().settings
    config = ModelRequest(ref, None, values).config(settings.model)
    return report(program, facts, config, as_json=as_json)


def report(program: Program, facts: Facts, config: EngineConfig, *, as_json: bool) -> int:
    """Prints a fit; the result is the exit code."""
    machine = read_machine()
    require_device(machine, config.device)
    device = device_of(machine, config.device)
    result = check_fit(
        facts,
        machine,
        config,
        budget_gb=program.settings().settings.memory.budget,
        disk=hub_cache(program.environ),
        bandwidth=device_bandwidth(machine, device, config.threads),
    )
    if as_json:
        output.write_json("fit", result.as_dict())
    else:
        _print(result)
    return Exit.OK if result.fits else Exit.DOES_NOT_FIT


def planner(program: Program) -> Callable[[ModelConfig], tuple[MemoryPlan | None, str]]:
    """How a model would be served here with the defaults, alone on the machine."""
    settings = program.settings().settings
    machine = read_machine()
    device = device_of(machine, settings.model.device)
    budget = total_budget(machine, device, settings.memory.budget)
    engine = EngineConfig(
        model_path="",
        name="",
        device=settings.model.device,
        dtype=settings.model.dtype,
        kv_dtype=settings.model.kv_dtype,
        quant=settings.model.quant,
        context=settings.model.ctx,
    )
    return lambda config: planned(config, machine, device, budget, engine)


def require_device(machine: Machine, asked: str) -> None:
    if asked == "cuda" and not machine.gpus:
        raise CliError("no GPU can be used", machine.no_gpu_reason or "none is visible", "--device cpu")


def _print(result: Fit) -> None:
    plan = result.plan
    verdict = "fits" if result.fits else "does not fit"
    output.write(f"{result.name} {verdict} on {result.device}.")
    if result.reason:
        output.write(f"  Why: {result.reason}")
    rows: dict[str, str] = {}
    if plan is not None:
        each = f" on each of {plan.ranks} ranks (tp {plan.tp}, pp {plan.pp})" if plan.ranks > 1 else ""
        rows |= {
            "weights": f"{output.size(plan.weights_bytes)} as {plan.dtype}",
            "workspace": output.size(plan.workspace_bytes),
            "KV cache": f"{output.size(plan.kv_bytes)}, {output.size(plan.kv_bytes_per_token)} a token"
            f" as {plan.kv_dtype}",
            "together": output.size(plan.total_bytes) + each,
            "context": f"{plan.context} tokens",
            "at once": f"{plan.max_concurrency:.1f} requests of full context, {plan.max_running} at most",
        }
    rows |= {
        "budget": f"{output.size(result.budget)} ({output.size(result.available)} free now)",
        "disk": f"{output.size(result.disk_need)} to fetch, {output.size(result.disk_free)} free"
        if result.disk_need
        else "all here",
    }
    if (speed := result.speed) is not None:
        rows["speed"] = (
            f"at most {speed.one_stream:.1f} tok/s for one stream, {speed.all_streams:.0f} for "
            f"{speed.streams} ({output.size(speed.bandwidth)}/s of memory)"
        )
        if speed.sums_bytes:
            rows["scaling"] = (
                f"{speed.scaling:.2f} times one rank; each sends {output.size(speed.sums_bytes)} a token"
            )
    for name, value in rows.items():
        output.write(f"  {name:10} {value}")
    for remedy in result.remedies:
        output.write(f"  Would fit  {remedy}")
    for note in result.notes:
        output.say(f"Note: {note}")
