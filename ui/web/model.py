"""One model in detail: what it is served with and why, what else it could be, and what it is called."""

import asyncio
from dataclasses import dataclass
from typing import Any

from litestar import Response, get
from litestar.params import FromQuery

from llmbox.app.catalog import DiskModel
from llmbox.app.control.load_history import read_loads
from llmbox.app.http.admin.models import describe_all
from llmbox.app.registry import RANGES, Alias
from llmbox.app.settings import Scalar, schema
from llmbox.engine.errors import EngineError

from .model_plan import CHOICES, asked_of, find_model, make_plan
from .render import Panel, PanelRequest, page, panel_of


@dataclass(frozen=True, slots=True)
class Effective:
    name: str
    value: Scalar
    origin: str
    common: bool
    """As built in: of less interest."""


@get("/models/show", name="panel_model")
async def model_page(request: PanelRequest, ref: FromQuery[str]) -> Response[str]:
    panel = panel_of(request)
    asked = asked_of(request.query_params)
    disk, config = await asyncio.to_thread(find_model, panel, ref)
    loaded = next((each for each in describe_all(panel.control) if each.ref == ref), None)
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
        made=await asyncio.to_thread(make_plan, panel, ref, config, asked),
        in_memory=loaded is not None,
        settings={name: schema()[f"model.{name}"] for name in CHOICES},
        common={name: panel.services.settings.get(f"model.{name}") for name in CHOICES},
        aliases=_aliases(panel, disk),
        ranges=RANGES,
    )


def _effective(panel: Panel, loaded: Any) -> list[Effective]:
    """Where each setting of a loaded model comes from: this load, or the settings of all models."""
    rows = []
    origins = panel.control.loaded.origins
    for name, value in loaded.options.items():
        common = panel.services.settings.get(f"model.{name}")
        origin = str(origins[f"model.{name}"]) if value == common else "given at load"
        built_in = origin == "default"
        rows.append(Effective(name, value, "built in" if built_in else origin, built_in))
    return rows


def _aliases(panel: Panel, disk: DiskModel) -> dict[str, Alias]:
    names = panel.control.library.registry.read_or_nothing().aliases
    return {name: alias for name, alias in names.items() if disk.ref.is_target(alias.model)}
