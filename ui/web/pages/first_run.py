"""First-run page: what is on this machine, what fits, a first question, and how to connect a client."""

import asyncio
import os
from dataclasses import dataclass

from litestar import Response, get

from llmbox.app.fit.recommendations import first_choices
from llmbox.app.http.admin.models import describe_all
from llmbox.app.http.admin.schema import ModelStatus
from llmbox.app.http.server.sockets import is_loopback
from llmbox.app.integrations.guides import GUIDES
from llmbox.app.models.catalog import DiskModel, on_disk
from llmbox.engine.errors import EngineError
from llmbox.engine.hardware.machine import Machine, read_machine
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryPlan

from ..render import Panel, PanelRequest, page, panel_of, render
from .models import downloads_of


@dataclass(frozen=True, slots=True)
class ModelChoice:
    disk: DiskModel
    plan: MemoryPlan | None
    reason: str
    state: str
    """State of the model in memory; empty if it is not loaded."""


@get("/first-run", name="panel_first_run")
async def first_run_page(request: PanelRequest) -> Response[str]:
    panel = panel_of(request)
    machine, candidates = await asyncio.to_thread(_look, panel)
    choices = first_choices(await panel.control.library.recommend())
    loaded = describe_all(panel.control)
    server = panel.services.settings.server
    return page(
        request,
        "first_run.html",
        "overview",
        machine=machine,
        candidates=candidates,
        choices=choices,
        models=loaded,
        downloads=downloads_of(panel),
        names=_names(loaded, candidates),
        needs_key=server.require_key or not is_loopback(panel.control.running.host),
        guides=GUIDES,
        url=panel.control.running.url,
    )


async def first_run_pieces(panel: Panel) -> dict[str, str]:
    downloads = downloads_of(panel)
    return {
        "loaded": render("live/models/loaded.html", panel, models=describe_all(panel.control)),
        "downloads": render("live/models/downloads.html", panel, downloads=downloads) if downloads else "",
    }


def _names(loaded: list[ModelStatus], candidates: list[ModelChoice]) -> list[str]:
    """Return the models that can be requested, ready ones first: a request loads a model from disk."""
    ready = [each.name for each in loaded if each.state == "ready"]
    return list(dict.fromkeys([*ready, *(each.disk.ref.name for each in candidates if each.plan)]))


def _look(panel: Panel) -> tuple[Machine, list[ModelChoice]]:
    states = {model.ref: model.state for model in describe_all(panel.control)}
    models = on_disk(os.environ, panel.control.library.registry.read())
    return read_machine(), [_candidate(panel, each, states) for each in models if each.servable]


def _candidate(panel: Panel, disk: DiskModel, states: dict[str, str]) -> ModelChoice:
    state = states.get(disk.ref.ref, "")
    try:
        plan, reason = panel.control.library.plan(parse_config(disk.ref.path))
    except EngineError as error:
        return ModelChoice(disk, None, str(error), state)
    return ModelChoice(disk, plan, reason, state)
