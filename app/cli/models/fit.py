"""`llmbox fit`: memory and speed of a model before anything is downloaded, here or on other GPUs (`--on`).
`load --estimate-only` is the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click

from llmbox.engine.checkpoint.adapter import Adapter, has_int8_numbers, read_adapter
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, ModelError
from llmbox.engine.hardware.gpus import GPU_MODELS, GpuModel, find_gpu_model

from ...control.kv_cache import limit_bytes
from ...errors import CliError, Exit
from ...fit.capacity import CapacityPlan, UserLoad, capacity_rows, plan_capacity, wait_warning
from ...fit.fit import Fit
from ...fit.gpu_prediction import USUAL_REQUEST, GpuPrediction, RequestSize, predict
from ...fit.recommendations import LocalPlanner, Recommendation, slow_warning, smaller_models
from ...fit.report import PREDICTED, fit_rows, prediction_rows, verdict
from ...hub.model_info import ModelFacts, find_facts
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...models.adapters import find_adapter
from ...models.load_request import ModelRequest, with_draft_path
from ...util import formatting
from ...util.formatting import did_you_mean
from .. import output
from ..options import mmproj_option, read_flags, setting_options

F = TypeVar("F", bound=Callable[..., Any])

NAME = 12
"""Characters of the column of names."""
FLAGS = (
    *("device", "dtype", "kv_dtype", "quant", "quant_head", "ctx", "max_running", "token_budget", "memory"),
    *("tp", "pp", "kv_host_memory", "expert_parallel", "redundant_experts", "cpu_experts", "disaggregate"),
    *("threads", "draft", "lora_memory"),
)
_MOST_TOKENS, _MOST_USERS = 10**7, 10**9
_USERS_ONLY = {"users": "--users", "per_minute": "--requests-per-minute", "tpot_target": "--tpot-target"}
_PREDICTION_ONLY = {
    "prices": "--price",
    "prompt": "--prompt",
    "output_tokens": "--output",
    "as_plan": "--plan",
}


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """Options of a prediction."""

    gpus: tuple[GpuModel, ...]
    prices: Mapping[str, float]
    """Price of a card an hour, by `GpuModel.name`."""
    load: RequestSize | None
    """Tokens of a request; None: the usual ones, or as many as the context holds."""
    users: UserLoad | None


_TOKENS = click.IntRange(1, _MOST_TOKENS)
_OPTIONS = (
    click.option(
        "--on",
        metavar="GPU,...",
        help="Predict these GPUs from their data sheets instead of this machine, such as rtx4090,h100.",
    ),
    click.option(
        "--price",
        "prices",
        metavar="GPU=X,...",
        help="With --on: price of a GPU per hour, to show the price of a million tokens.",
    ),
    click.option(
        "--prompt",
        type=_TOKENS,
        metavar="N",
        help=f"With --on: prompt tokens per request ({USUAL_REQUEST.prompt}).",
    ),
    click.option(
        "--output",
        "output_tokens",
        type=_TOKENS,
        metavar="N",
        help=f"With --on: output tokens per request ({USUAL_REQUEST.output}).",
    ),
    click.option(
        "--plan",
        "as_plan",
        is_flag=True,
        help="With --on: show step by step how many GPUs --users need.",
    ),
    click.option(
        "--users",
        type=click.IntRange(1, _MOST_USERS),
        metavar="N",
        help="With --plan: users that are served at the same time.",
    ),
    click.option(
        "--requests-per-minute",
        "per_minute",
        type=click.FloatRange(0, 1e6, min_open=True),
        metavar="X",
        help="With --plan: requests per minute of one user (1).",
    ),
    click.option(
        "--tpot-target",
        type=click.FloatRange(0, 1e9, min_open=True),
        metavar="MS",
        help="With --plan: maximum milliseconds per output token.",
    ),
)


def prediction_options(function: F) -> F:
    """Add the options of a prediction to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def read_request(flags: Mapping[str, Any]) -> PredictionRequest | None:
    """Return the prediction that options ask for, or None. Raises UsageError."""
    on = flags["on"]
    needless = _PREDICTION_ONLY | _USERS_ONLY if on is None else {} if flags["as_plan"] else _USERS_ONLY
    for name, option in needless.items():
        if flags[name]:
            raise click.UsageError(f"{option} needs {'--on GPU,...' if on is None else '--plan'}")
    if on is None:
        return None
    gpus = read_gpu_models(on)
    for option, value in (
        ("--requests-per-minute", flags["per_minute"]),
        ("--tpot-target", flags["tpot_target"]),
    ):
        if value is not None and not math.isfinite(value):
            raise click.BadParameter("a number is needed", param_hint=option)
    load = None
    if flags["prompt"] or flags["output_tokens"] or flags["as_plan"]:
        prompt, written = (
            flags["prompt"] or USUAL_REQUEST.prompt,
            flags["output_tokens"] or USUAL_REQUEST.output,
        )
        load = RequestSize(prompt, written)
    users = None
    if flags["as_plan"]:
        if flags["users"] is None:
            raise click.UsageError("--plan needs --users N")
        assert load is not None
        target = flags["tpot_target"]
        users = UserLoad(
            users=flags["users"],
            per_minute=flags["per_minute"] or 1.0,
            request=load,
            tpot_target=None if target is None else target / 1000,
        )
    prices = {} if flags["prices"] is None else read_prices(flags["prices"], gpus)
    return PredictionRequest(gpus, prices, load, users)


def read_gpu_models(text: str) -> tuple[GpuModel, ...]:
    """Return the GPU models of `rtx4090,h100`, each once. Raises BadParameter."""
    return tuple(dict.fromkeys(_known_model(name.strip(), "--on") for name in text.split(",")))


def _known_model(name: str, option: str) -> GpuModel:
    found = find_gpu_model(name)
    if found is None:
        hint = did_you_mean(name, GPU_MODELS)
        known = ", ".join(GPU_MODELS)
        raise click.BadParameter(
            f"no data sheet of {name!r} is included: {hint}known are {known}", param_hint=option
        )
    return found


def read_prices(text: str, gpus: tuple[GpuModel, ...]) -> dict[str, float]:
    """Return the prices of `h100=2.5,rtx4090=0.4` by name. Raises BadParameter."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        model = _known_model(name, "--price")
        if model not in gpus:
            raise click.BadParameter(f"{model.name} is not among the GPUs of --on", param_hint="--price")
        if model.name in found:
            raise click.BadParameter(f"{model.name} has two prices", param_hint="--price")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not 0 < price < 1e9:
            raise click.BadParameter(
                f"{part.strip()!r}: write NAME=PRICE, PRICE is that of one GPU per hour, above 0",
                param_hint="--price",
            )
        found[model.name] = price
    return found


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


def report_prediction(
    facts: ModelFacts, config: EngineConfig, asked: PredictionRequest, *, as_json: bool
) -> int:
    """Print a prediction for each GPU model. Returns the exit code."""
    predictions: list[tuple[GpuPrediction, CapacityPlan | None]] = []
    for gpu in asked.gpus:
        found = predict(facts.config, gpu, config, load=asked.load, price=asked.prices.get(gpu.name))
        plan = plan_capacity(found, asked.users) if asked.users and found.times is not None else None
        predictions.append((found, plan))
    if as_json:
        rows = [found.as_dict() | {"users": plan and plan.as_dict()} for found, plan in predictions]
        output.write_json(
            "fit.on", {"name": facts.name, "source": "data sheets", "notes": list(facts.notes), "gpus": rows}
        )
    else:
        for found, plan in predictions:
            _print_prediction(facts.name, found, plan, is_plan=asked.users is not None)
        for note in (*facts.notes, PREDICTED):
            output.say(f"Note: {note}")
    does = (
        found.fits and (asked.users is None or (plan is not None and plan.is_within_target))
        for found, plan in predictions
    )
    return Exit.OK if any(does) else Exit.DOES_NOT_FIT


def _print_prediction(name: str, found: GpuPrediction, plan: CapacityPlan | None, *, is_plan: bool) -> None:
    cards = f"{found.cards} x {found.gpu.title}" if found.cards > 1 else found.gpu.title
    output.write(f"{name} {'fits' if found.fits else 'does not fit'} on {cards}.")
    rows = prediction_rows(found)
    if plan is not None:
        rows = {name: rows[name] for name in ("card", "weights")} | dict(capacity_rows(found, plan))
    elif is_plan and found.fits:
        rows["engines"] = "no speed is predicted for models that write no text"
    for label, value in rows.items():
        output.write(f"  {label:10} {value}")
    for remedy in found.remedies:
        output.write(f"  would fit  {remedy}")
    for note in found.plan.notes if found.plan is not None else ():
        output.say(f"Note: {found.gpu.title}: {note}")
    if plan is not None and (warning := wait_warning(plan)):
        output.say(f"Note: {warning}")
