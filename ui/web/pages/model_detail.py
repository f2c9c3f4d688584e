"""Model page: effective settings and their origins, a what-if plan, aliases and the chat template."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from litestar import MediaType, Response, get, post
from litestar.params import FromQuery

from llmbox.app.config.entries import Scalar
from llmbox.app.config.loader import check_value
from llmbox.app.config.settings import schema
from llmbox.app.control.kv_cache import limit_bytes
from llmbox.app.engines.eviction import total_budget
from llmbox.app.errors import ApiError, CliError, Exit
from llmbox.app.fit.fit import plan_alone
from llmbox.app.http.admin.models import describe_all
from llmbox.app.http.server.request import form_of
from llmbox.app.models.adapters import set_alias
from llmbox.app.models.catalog import DiskModel, describe
from llmbox.app.models.load_request import ModelRequest
from llmbox.app.models.registry import RANGES, Alias
from llmbox.app.text.chat_template import Chat
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer import TextModel
from llmbox.engine.errors import EngineError, ModelError
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.planning.estimator import MemoryPlan
from llmbox.engine.planning.performance_model import decode_tokens_per_second
from llmbox.kernels.quant_formats import QUANTS

from ....app.control.residency import read_loads
from ..render import PageContext, PanelRequest, done, is_fragment, page, panel_of, render

CHOICES: Final = ("ctx", "memory", "dtype", "quant", "kv_dtype", "max_running", "tp")
"""Settings of a plan by short key: in the page's URL and in the form that loads the model."""


@dataclass(frozen=True, slots=True)
class WhatIfPlan:
    """Memory plan for chosen settings. `plan` is None if `reason` says why. `asked` holds the chosen values
    by short key.
    """

    ref: str
    asked: Mapping[str, str]
    plan: MemoryPlan | None
    reason: str
    budget: int = 0
    parts: list[tuple[str, float, float]] = field(default_factory=list)
    """(kind, start, share) of each part of the budget."""
    kv_disk: int = 0
    """Bytes of the KV cache on disk."""


DIVERGENCE: Final = {"none": 0.0, "int8": 0.00009, "int4-mix": 0.00216, "int4": 0.00311, "int4-g128": 0.00849}
"""Formats of weights to choose from, with the mean Kullback-Leibler divergence a token from the unquantized
model, as measured on the built-in model (docs/notes/quantization-quality.md).
"""


@dataclass(frozen=True, slots=True)
class WeightFormatRow:
    """Format of a model's weights, with the plan that it leads to."""

    name: str
    made: WhatIfPlan
    speed: float
    """Decoding speed of one stream relative to unquantized weights, if memory bandwidth is the limit."""
    divergence: float


def weight_formats(
    panel: PageContext, ref: str, config: ModelConfig | EngineError, asked: Mapping[str, str]
) -> list[WeightFormatRow]:
    """Plan the model in each format. Empty for checkpoints that are quantized already."""
    if isinstance(config, EngineError):
        return []
    made = {name: make_plan(panel, ref, config, {**asked, "quant": name}) for name in DIVERGENCE}
    if any(each.plan is not None and each.plan.quant != name for name, each in made.items()):
        return []
    shape = config.shape()

    def speed(name: str, plan: MemoryPlan | None) -> float:
        """Speed relative to unquantized weights; 0 for a plan with experts in main memory."""
        return 0.0 if plan is None or plan.expert_bytes else rate(name, plan) / rate("none", plan)

    def rate(name: str, plan: MemoryPlan) -> float:
        quant = QUANTS.get(name)
        return decode_tokens_per_second(
            shape, plan.dtype, plan.kv_dtype, 1.0, rows=1, context=plan.context // 4, quant=quant
        )

    return [
        WeightFormatRow(
            name,
            each,
            speed(name, each.plan),
            DIVERGENCE[name],
        )
        for name, each in made.items()
    ]


@get("/models/plan", name="panel_plan")
async def plan_piece(request: PanelRequest, ref: FromQuery[str]) -> Response[str]:
    panel = panel_of(request)
    asked = chosen_settings(request.query_params)
    disk, config = await asyncio.to_thread(find_model, panel, ref)
    made = await asyncio.to_thread(make_plan, panel, ref, config, asked)
    html = render(
        "live/models/plan.html", panel, made=made, in_memory=panel.services.engines.knows(disk.ref.name)
    )
    return Response(html, media_type=MediaType.HTML)


def chosen_settings(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the chosen values by short key."""
    return {name: text for name in CHOICES if (text := fields.get(name, "").strip())}


def options_of(asked: Mapping[str, str]) -> dict[str, Scalar]:
    """Convert to options by full key. Raises CliError for an invalid value."""
    rows = {f"model.{name}": text for name, text in asked.items()}
    return {name: check_value(schema()[name], text, name, from_text=True) for name, text in rows.items()}


def find_model(panel: PageContext, ref: str) -> tuple[DiskModel, ModelConfig | EngineError]:
    """Return the model and its config, or the error that kept the config from being read. Raises ApiError
    404.
    """
    try:
        found = describe(panel.control.resolve(ref))
    except CliError as error:
        raise ApiError(404, f"{error.what}: {error.why}.", "model_not_found") from error
    try:
        return found, parse_config(found.ref.path)
    except EngineError as error:
        return found, error


def make_plan(
    panel: PageContext, ref: str, config: ModelConfig | EngineError, asked: Mapping[str, str]
) -> WhatIfPlan:
    """Plan the memory. Reads the machine: not to be called in the event loop's thread."""
    if isinstance(config, EngineError):
        return WhatIfPlan(ref, asked, None, str(config))
    settings = panel.services.settings
    try:
        found = panel.control.resolve(ref)
        options = options_of(asked)
    except CliError as error:
        return WhatIfPlan(ref, asked, None, f"{error.why}.")
    machine = read_machine()
    engine = ModelRequest(found, "plan", options).config(settings.model)
    plan, reason = plan_alone(config, machine, engine, settings.memory.budget)
    if plan is None:
        return WhatIfPlan(ref, asked, None, reason)
    budget = total_budget(machine, plan.device, settings.memory.budget)
    kv_disk = limit_bytes(panel.services.paths, settings.cache) if plan.kv_bytes_per_token else 0
    return WhatIfPlan(ref, asked, plan, reason, budget, _parts(plan, budget), kv_disk)


def _parts(plan: MemoryPlan, budget: int) -> list[tuple[str, float, float]]:
    parts, start = [], 0.0
    work = plan.workspace_bytes + plan.buffer_bytes
    sizes = (("weights", plan.weights_bytes), ("live", plan.kv_bytes), ("workspace", work))
    for kind, size in sizes:
        share = size * plan.ranks_in_memory / budget
        parts.append((kind, start, share))
        start += share
    return parts


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    name: str
    value: Scalar
    origin: str
    common: bool
    """True for a built-in default, which is of less interest."""


@get("/models/show", name="panel_model")
async def model_page(request: PanelRequest, ref: FromQuery[str]) -> Response[str]:
    panel = panel_of(request)
    asked = chosen_settings(request.query_params)
    disk, config = await asyncio.to_thread(find_model, panel, ref)
    loaded = next((each for each in describe_all(panel.control) if each.ref == ref), None)
    loads = await asyncio.to_thread(read_loads, panel.services.paths.loads_file)
    return page(
        request,
        "models/model.html",
        "models",
        ref=ref,
        disk=disk,
        config=None if isinstance(config, EngineError) else config,
        loaded=loaded,
        effective=_effective(panel, loaded) if loaded else [],
        loads=loads.get(loaded.name if loaded else disk.ref.name, [])[::-1],
        made=await asyncio.to_thread(make_plan, panel, ref, config, asked),
        formats=await asyncio.to_thread(weight_formats, panel, ref, config, asked),
        in_memory=loaded is not None,
        settings={name: schema()[f"model.{name}"] for name in CHOICES},
        common={name: panel.services.settings.get(f"model.{name}") for name in CHOICES},
        aliases=_aliases(panel, disk),
        ranges=RANGES,
    )


def _effective(panel: PageContext, loaded: Any) -> list[EffectiveSetting]:
    """Return the origin of each setting of a loaded model: this load, or the settings of all models."""
    rows = []
    origins = panel.control.loaded.origins
    for name, value in loaded.options.items():
        common = panel.services.settings.get(f"model.{name}")
        origin = str(origins[f"model.{name}"]) if value == common else "given at load"
        built_in = origin == "default"
        rows.append(EffectiveSetting(name, value, "built in" if built_in else origin, built_in))
    return rows


def _aliases(panel: PageContext, disk: DiskModel) -> dict[str, Alias]:
    names = panel.control.library.registry.read_or_nothing().aliases
    return {name: alias for name, alias in names.items() if disk.ref.is_target(alias.model)}


SYSTEM: Final = "You answer in few words."
USER: Final = "What is the capital of France?"
LONGEST: Final = 20_000
"""Maximum number of characters of a sample message."""


@post("/models/alias", status_code=200, name="panel_alias")
async def add_alias(request: PanelRequest) -> Response[str]:
    form = await form_of(request)
    name, ref = form.get("name", "").strip(), form.get("ref", "")
    given = [f"{key}={value.strip()}" for key in (*RANGES, "system") if (value := form.get(key, "")).strip()]
    control = panel_of(request).control
    try:
        await asyncio.to_thread(
            set_alias, control.library.registry, os.environ, name, ref, given, control.in_memory()
        )
    except CliError as error:
        status = {Exit.NOT_FOUND: 404, Exit.CONFLICT: 409}.get(error.exit, 400)
        raise ApiError(status, f"{error.what}: {error.why}.", "bad_alias") from error
    return _back(request, ref, f"{name} is now an alias of this model.")


@post("/models/alias/remove", status_code=200, name="panel_alias_remove")
async def remove_alias(request: PanelRequest) -> Response[str]:
    form = await form_of(request)
    name = form.get("name", "")
    try:
        await asyncio.to_thread(panel_of(request).control.library.registry.remove_alias, name)
    except CliError as error:
        raise ApiError(404, f"{error.what}: {error.why}.", "alias_not_found") from error
    return _back(request, form.get("ref", ""), f"{name} is no longer an alias.")


@get("/models/template", name="panel_template")
async def template_preview(
    request: PanelRequest,
    ref: FromQuery[str],
    system: FromQuery[str] = SYSTEM,
    user: FromQuery[str] = USER,
) -> Response[str]:
    """Render the chat template as for a request: in the killable worker, with special tokens in messages kept
    as text.
    """
    panel = panel_of(request)
    values = await _render_preview(panel, ref, system[:LONGEST], user[:LONGEST])
    if is_fragment(request):
        return Response(render("live/models/template.html", panel, **values), media_type=MediaType.HTML)
    return page(request, "models/template.html", "models", ref=ref, system=system, user=user, **values)


async def _render_preview(panel: PageContext, ref: str, system: str, user: str) -> dict[str, Any]:
    text = await _text(panel, ref)
    messages = [{"role": "user", "content": user}]
    if system.strip():
        messages.insert(0, {"role": "system", "content": system})
    try:
        rendered = await text.render_chat(panel.services.gateway.templates, Chat(messages=messages))
    except ApiError as error:
        return {"prompt": "", "tokens": 0, "source": text.chat_template or "", "problem": error.message}
    ids = await asyncio.to_thread(rendered.ids)
    return {"prompt": rendered.text, "tokens": len(ids), "source": text.chat_template or "", "problem": ""}


async def _text(panel: PageContext, ref: str) -> TextModel:
    """Return the tokenizer of the loaded model, or read it from its files. Raises ApiError."""
    disk, _ = await asyncio.to_thread(find_model, panel, ref)
    loaded = panel.services.engines.find(disk.ref.name)
    if loaded is not None:
        return loaded.text
    try:
        return await asyncio.to_thread(load_model_text, disk.ref.path)
    except ModelError as error:
        raise ApiError(400, f"The tokenizer cannot be read: {error}", "bad_model") from error


def _back(request: PanelRequest, ref: str, said: str) -> Response[str]:
    answer = done(request, f"/admin/models/show?{urlencode({'ref': ref})}#names-title", said)
    if is_fragment(request):
        answer.headers["HX-Refresh"] = "true"
    return answer
