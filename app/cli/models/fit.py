"""`llmbox fit`: memory estimate of a model before anything is downloaded. `load --estimate-only` is
the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from llmbox.engine.checkpoint.adapter import Adapter, has_int8_numbers, read_adapter
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, ModelError

from ...control.kv_cache import limit_bytes
from ...errors import CliError, Exit
from ...fit.fit import Fit
from ...fit.recommendations import LocalPlanner, Recommendation, slow_warning, smaller_models
from ...fit.report import fit_rows, verdict
from ...hub.model_info import ModelFacts, find_facts
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...models.adapters import find_adapter
from ...models.load_request import ModelRequest, with_draft_path
from ...util import formatting
from .. import output
from ..options import mmproj_option, read_flags, setting_options
from .fit_prediction import prediction_options, read_request, report_prediction

NAME = 12
"""Characters of the column of names."""
FLAGS = (
    *("device", "dtype", "kv_dtype", "quant", "quant_head", "ctx", "max_running", "token_budget", "memory"),
    *("tp", "pp", "kv_host_memory", "expert_parallel", "redundant_experts", "cpu_experts", "disaggregate"),
    *("threads", "draft", "lora_memory"),
)


@click.command(cls=Command)
@click.argument("model")
@setting_options(*(f"model.{name}" for name in FLAGS))
@mmproj_option
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="DIR",
    help="Also plan memory for this LoRA adapter, a folder or the name of an adapter. May be repeated.",
)
@click.option("--probe", is_flag=True, help="Measure the memory bandwidth again.")
@prediction_options
@json_option
@pass_program
def fit(
    program: Program,
    /,
    model: str,
    mmproj: str | None,
    *,
    adapters: tuple[str, ...],
    as_json: bool,
    probe: bool,
    **flags: Any,
) -> int:
    """Show whether MODEL fits on this machine, with which context and speed; exit 5 if it does not.

    MODEL is on disk, or on the hub, where only its config and the headers of its weights are read. With --on,
    other GPUs are predicted from their data sheets; exit 5 if it fits on none of them.
    """
    asked = read_request(flags)
    values = {name: value for name, value in read_flags(flags).items() if name.startswith("model.")}
    on_host = values.get("model.cpu_experts") == "on"
    if asked is not None and (probe or adapters or on_host or flags["device"] == "cpu"):
        raise click.UsageError(
            "--probe, --lora, --cpu-experts on and --device cpu are about this machine: leave them out with "
            "--on"
        )
    model = program.with_projector(model, mmproj)
    facts, ref = find_facts(model, program.environ, program.names, program.in_memory())
    settings = program.settings().settings
    config = ModelRequest(ref, None, with_draft_path(values, program.resolve)).config(settings.model)
    if asked is not None:
        return report_prediction(facts, config, asked, as_json=as_json)
    return report(program, facts, config, as_json=as_json, probe=probe, adapters=adapters)


def report(
    program: Program,
    facts: ModelFacts,
    config: EngineConfig,
    *,
    as_json: bool,
    probe: bool = False,
    adapters: Sequence[str] = (),
) -> int:
    """Print a fit, with memory for these adapters. Returns the exit code."""
    found = {text: _read_adapter(program, text) for text in adapters}
    config = replace(config, plans_adapters=config.plans_adapters or bool(found))
    try:
        kv_disk = limit_bytes(program.paths, program.settings().settings.cache)
        result = planner(program).fit(facts, config, kv_disk=kv_disk, probe=probe)
    except DeviceError as error:
        raise CliError(f"{facts.name} cannot be served", str(error), "llmbox doctor") from error
    width = 4 if result.plan is not None and result.plan.dtype == "float32" else 2
    is_int8 = result.plan is not None and has_int8_numbers(result.plan.device, result.plan.quant)
    sizes = {text: adapter.memory_bytes(width, is_int8=is_int8) for text, adapter in found.items()}
    fits = result.fits and all(nbytes <= config.lora_bytes for nbytes in sizes.values())
    if as_json:
        told = {"adapters": sizes, "adapter_budget": config.lora_bytes} if sizes else {}
        output.write_json("fit", result.as_dict() | told | {"fits": fits})
    else:
        _print(result)
        for text, nbytes in sizes.items():
            excess = "" if nbytes <= config.lora_bytes else ", more than there is: --lora-memory GB"
            of = f"{formatting.size(nbytes)} of {formatting.size(config.lora_bytes)} for adapters{excess}"
            output.write(f"  {'adapter':{NAME}} {formatting.printable(text)}: {of}")
        if result.plan is None:
            for text in smaller_models(result.name, recommendations(program, config)):
                output.write(f"  {'fits here':{NAME}} {text}")
        elif slow := slow_warning(result.speed, recommendations(program)):
            output.say(f"Note: {slow}")
    return Exit.OK if fits else Exit.DOES_NOT_FIT


def _read_adapter(program: Program, text: str) -> Adapter:
    """Parse an adapter by its name or folder. Raises CliError."""
    folder, _ = find_adapter(program.registry, text)
    try:
        return read_adapter(folder)
    except ModelError as error:
        raise CliError(
            f"{text} cannot be used", str(error), "docs/adapters.md lists what is supported"
        ) from None


def planner(program: Program) -> LocalPlanner:
    return LocalPlanner(program.settings().settings, program.paths, program.environ)


def slow_here(program: Program, facts: ModelFacts) -> str:
    """Return a sentence if a model with the default settings would answer slowly here; empty where it is
    fast, does not fit, or its speed is not known.
    """
    here = planner(program)
    try:
        result = here.fit(facts, here.engine)
    except DeviceError:
        return ""
    return slow_warning(result.speed, recommendations(program)) if result.speed else ""


def recommendations(program: Program, config: EngineConfig | None = None) -> list[Recommendation]:
    """Plan the recommended models on this machine. Raises CliError where there is no such device."""
    try:
        return planner(program).recommend(program.names, config)
    except DeviceError as error:
        raise CliError("no model can be served", str(error), "llmbox doctor") from error


def _print(result: Fit) -> None:
    output.write(verdict(result))
    for name, value in fit_rows(result).items():
        output.write(f"  {name:{NAME}} {value}")
    for remedy in result.remedies:
        output.write(f"  {'or' if result.plan else 'would fit':{NAME}} {remedy}")
    for note in result.notes:
        output.say(f"Note: {note}")
