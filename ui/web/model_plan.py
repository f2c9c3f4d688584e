"""What a model would take with other settings: by the function that sizes the pool at load."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from litestar import MediaType, Response, get
from litestar.params import FromQuery

from llmbox.app.catalog import DiskModel, describe
from llmbox.app.control.model_request import ModelRequest
from llmbox.app.engines.budget import total_budget
from llmbox.app.errors import ApiError, CliError
from llmbox.app.hub.fit import plan_alone
from llmbox.app.settings import Scalar, schema
from llmbox.app.settings_load import check_value
from llmbox.engine.errors import EngineError
from llmbox.engine.estimator import MemoryPlan
from llmbox.engine.machine import read_machine
from llmbox.engine.model_config import ModelConfig, parse_config

from .render import Panel, PanelRequest, panel_of, render

CHOICES: Final = ("ctx", "memory", "dtype", "quant", "kv_dtype", "max_running", "tp")
"""Settings of a plan, by short key: in the URL of the page, and in the form that loads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`plan` is None where `reason` says why. `asked` holds what was chosen, by short key."""

    ref: str
    asked: Mapping[str, str]
    plan: MemoryPlan | None
    reason: str
    budget: int = 0
    parts: list[tuple[str, float, float]] = field(default_factory=list)
    """(kind, start, share) of the budget."""


@get("/models/plan", name="panel_plan")
async def plan_piece(request: PanelRequest, ref: FromQuery[str]) -> Response[str]:
    panel = panel_of(request)
    asked = asked_of(request.query_params)
    disk, config = await asyncio.to_thread(find_model, panel, ref)
    made = await asyncio.to_thread(make_plan, panel, ref, config, asked)
    html = render("live/plan.html", panel, made=made, in_memory=panel.services.engines.knows(disk.ref.name))
    return Response(html, media_type=MediaType.HTML)


def asked_of(fields: Mapping[str, str]) -> dict[str, str]:
    """Only what was chosen."""
    return {name: text for name in CHOICES if (text := fields.get(name, "").strip())}


def options_of(asked: Mapping[str, str]) -> dict[str, Scalar]:
    """By full key. Raises CliError for a value that cannot be."""
    rows = {f"model.{name}": text for name, text in asked.items()}
    return {name: check_value(schema()[name], text, name, from_text=True) for name, text in rows.items()}


def find_model(panel: Panel, ref: str) -> tuple[DiskModel, ModelConfig | EngineError]:
    """With why its config cannot be read, in place of the config. Raises ApiError 404."""
    try:
        found = describe(panel.control.resolve(ref))
    except CliError as error:
        raise ApiError(404, f"{error.what}: {error.why}.", "model_not_found") from error
    try:
        return found, parse_config(found.ref.path)
    except EngineError as error:
        return found, error


def make_plan(panel: Panel, ref: str, config: ModelConfig | EngineError, asked: Mapping[str, str]) -> Plan:
    """Reads the machine: for any thread but the loop's."""
    if isinstance(config, EngineError):
        return Plan(ref, asked, None, str(config))
    settings = panel.services.settings
    try:
        found = panel.control.resolve(ref)
        options = options_of(asked)
    except CliError as error:
        return Plan(ref, asked, None, f"{error.why}.")
    machine = read_machine()
    engine = ModelRequest(found, "plan", options).config(settings.model)
    plan, reason = plan_alone(config, machine, engine, settings.memory.budget)
    if plan is None:
        return Plan(ref, asked, None, reason)
    budget = total_budget(machine, plan.device, settings.memory.budget)
    return Plan(ref, asked, plan, reason, budget, _parts(plan, budget))


def _parts(plan: MemoryPlan, budget: int) -> list[tuple[str, float, float]]:
    parts, start = [], 0.0
    sizes = (("weights", plan.weights_bytes), ("live", plan.kv_bytes), ("workspace", plan.workspace_bytes))
    for kind, size in sizes:
        share = size * plan.ranks_in_memory / budget
        parts.append((kind, start, share))
        start += share
    return parts
