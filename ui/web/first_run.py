"""From nothing to a first answer on one screen: what is here, what fits, ask it, connect a client."""

import asyncio
import os
from dataclasses import dataclass

from litestar import Response, get

from llmbox.app.catalog import DiskModel, on_disk
from llmbox.app.http.admin.models import describe_all
from llmbox.engine.errors import EngineError
from llmbox.engine.estimator import MemoryPlan
from llmbox.engine.machine import Machine, read_machine
from llmbox.engine.model_config import parse_config

from .render import Panel, PanelRequest, page, panel_of


@dataclass(frozen=True, slots=True)
class Candidate:
    disk: DiskModel
    plan: MemoryPlan | None
    reason: str
    state: str
    """Of the model in memory; empty when it is not."""


@get("/first-run", name="panel_first_run")
async def first_run_page(request: PanelRequest) -> Response[str]:
    panel = panel_of(request)
    machine, candidates = await asyncio.to_thread(_look, panel)
    ready = [each for each in describe_all(panel.control) if each.state == "ready"]
    return page(
        request,
        "first_run.html",
        "overview",
        machine=machine,
        candidates=candidates,
        ready=ready,
        url=panel.control.running.url,
    )


def _look(panel: Panel) -> tuple[Machine, list[Candidate]]:
    states = {model.ref: model.state for model in describe_all(panel.control)}
    models = on_disk(os.environ, panel.control.library.registry.read())
    return read_machine(), [_candidate(panel, each, states) for each in models if each.servable]


def _candidate(panel: Panel, disk: DiskModel, states: dict[str, str]) -> Candidate:
    state = states.get(disk.ref.ref, "")
    try:
        plan, reason = panel.control.library.plan(parse_config(disk.ref.path))
    except EngineError as error:
        return Candidate(disk, None, str(error), state)
    return Candidate(disk, plan, reason, state)
