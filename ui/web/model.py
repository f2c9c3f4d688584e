"""One model in detail: what it is served with and why, and what other settings would take."""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from litestar import MediaType, Response, get

from llmbox.app.catalog import DiskModel, describe, resolve
from llmbox.app.daemon.load_history import read_loads
from llmbox.app.daemon.model_request import ModelRequest
from llmbox.app.engines.budget import device_of, total_budget
from llmbox.app.errors import ApiError, CliError
from llmbox.app.http.admin.models import describe_all
from llmbox.app.hub.fit import planned
from llmbox.app.settings import Scalar, schema
from llmbox.app.settings_load import check_value
from llmbox.engine.errors import EngineError
from llmbox.engine.estimator import MemoryPlan
from llmbox.engine.machine import read_machine
from llmbox.engine.model_config import ModelConfig, parse_config

from .render import Panel, PanelRequest, page, panel_of, render

CHOICES = ("ctx", "memory", "dtype", "kv_dtype", "max_running")
"""Settings of a plan, by short key, as they come in the URL."""


@dataclass(frozen=True, slots=True)
class Plan:
    plan: MemoryPlan | None
    reason: str
    budget: int
    parts: list[tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class Effective:
    name: str
    value: Scalar
    origin: str


@get("/models/show", name="panel_model")
async def model_page(
    request: PanelRequest,
    ref: str,
    ctx: str = "",
    memory: str = "",
    dtype: str = "",
    kv_dtype: str = "",
    max_running: str = "",
) -> Response[str]:
    panel = panel_of(request)
    disk, config = await asyncio.to_thread(_find, panel, ref)
    loaded = next((each for each in describe_all(panel.control) if each.ref == ref), None)
    asked = dict(zip(CHOICES, (ctx, memory, dtype, kv_dtype, max_running), strict=True))
    made = await asyncio.to_thread(_plan, panel, ref, config, asked)
    loads = await asyncio.to_thread(read_loads, panel.services.paths.loads_file)
    return page(
        request,
        "model.html",
        "models",
        ref=ref,
        disk=disk,
        config=None if isinstance(config, EngineError) else config,
        loaded=loaded,
        effective=_effective(panel, loaded) if loaded else [],
        loads=loads.get(loaded.name if loaded else disk.ref.name, [])[::-1],
        made=made,
        asked=asked,
        dtypes=schema()["model.dtype"].choices,
        kv_dtypes=schema()["model.kv_dtype"].choices,
    )


@get("/models/plan", name="panel_plan")
async def plan_piece(
    request: PanelRequest,
    ref: str,
    ctx: str = "",
    memory: str = "",
    dtype: str = "",
    kv_dtype: str = "",
    max_running: str = "",
) -> Response[str]:
    panel = panel_of(request)
    _, config = await asyncio.to_thread(_find, panel, ref)
    asked = dict(zip(CHOICES, (ctx, memory, dtype, kv_dtype, max_running), strict=True))
    made = await asyncio.to_thread(_plan, panel, ref, config, asked)
    return Response(render("live/plan.html", panel, made=made), media_type=MediaType.HTML)


def _find(panel: Panel, ref: str) -> tuple[DiskModel, ModelConfig | EngineError]:
    """With why its config cannot be read, in place of the config. Raises ApiError 404."""
    try:
        found = describe(resolve(ref, os.environ, panel.control.library.registry.read()))
    except CliError as error:
        raise ApiError(404, f"{error.what}: {error.why}.", "model_not_found") from error
    try:
        return found, parse_config(found.ref.path)
    except EngineError as error:
        return found, error


def _plan(panel: Panel, ref: str, config: ModelConfig | EngineError, asked: dict[str, str]) -> Plan:
    """By the function that sizes the pool at load."""
    if isinstance(config, EngineError):
        return Plan(None, str(config), 0, [])
    settings = panel.services.settings
    machine = read_machine()
    try:
        options = {
            f"model.{name}": check_value(schema()[f"model.{name}"], text.strip(), name, from_text=True)
            for name, text in asked.items()
            if text.strip()
        }
        found = resolve(ref, os.environ, panel.control.library.registry.read())
    except CliError as error:
        return Plan(None, f"{error.why}.", 0, [])
    engine = ModelRequest(found, "plan", options).config(settings.model)
    device = device_of(machine, engine.device)
    budget = total_budget(machine, device, settings.memory.budget)
    plan, reason = planned(config, machine, device, budget, engine)
    return Plan(plan, reason, budget, _parts(plan, budget) if plan else [])


def _parts(plan: MemoryPlan, budget: int) -> list[tuple[str, float, float]]:
    parts, start = [], 0.0
    sizes = (("weights", plan.weights_bytes), ("used", plan.kv_bytes), ("others", plan.workspace_bytes))
    for kind, size in sizes:
        parts.append((kind, start, size / budget))
        start += size / budget
    return parts


def _effective(panel: Panel, loaded: Any) -> list[Effective]:
    """Where each setting of a loaded model comes from: this load, or the settings of all models."""
    rows = []
    origins = panel.control.loaded.origins
    for name, value in loaded.options.items():
        common = panel.services.settings.get(f"model.{name}")
        origin = str(origins[f"model.{name}"]) if value == common else "given at load"
        rows.append(Effective(name, value, "built in" if origin == "default" else origin))
    return rows
