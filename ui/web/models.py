"""Models on this disk and in memory: load, unload."""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from litestar import Response, get, post

from llmbox.app.catalog import DiskModel, on_disk
from llmbox.app.errors import ApiError, CliError, Exit
from llmbox.app.http.admin.models import describe_all
from llmbox.app.http.forms import form_of

from .forms import done
from .model_plan import asked_of, options_of
from .render import Panel, PanelRequest, page, panel_of, render

BACK = "/admin/models"


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the list: on disk, in memory, or both."""

    name: str
    ref: str
    disk: DiskModel | None
    loaded: Any | None


@get("/models", name="panel_models")
async def models_page(request: PanelRequest) -> Response[str]:
    return page(request, "models.html", "models", rows=await _rows(panel_of(request)))


async def models_pieces(panel: Panel) -> dict[str, str]:
    return {"installed": render("live/installed.html", panel, rows=await _rows(panel))}


@post("/models/load", status_code=200, name="panel_load")
async def load_model(request: PanelRequest) -> Response[str]:
    control = panel_of(request).control
    form = await form_of(request)
    try:
        options = {name.partition(".")[2]: value for name, value in options_of(asked_of(form)).items()}
        wanted = await asyncio.to_thread(control.model_request, form.get("model", ""), None, options)
        control.begin_load(wanted)
    except CliError as error:
        status = 404 if error.exit == Exit.NOT_FOUND else 400
        raise ApiError(status, f"{error.what}: {error.why}", "bad_model", "model") from error
    return done(request, BACK, f"Loading {wanted.served_name}.")


@post("/models/pin", status_code=200, name="panel_pin")
async def pin_model(request: PanelRequest) -> Response[str]:
    """A pinned model is neither evicted for others nor unloaded when idle."""
    form = await form_of(request)
    name, pinned = form.get("model", ""), form.get("pinned") == "1"
    panel_of(request).control.residency.pin(name, pinned=pinned)
    said = "stays in memory" if pinned else "may leave memory when idle"
    return done(request, BACK, f"{name} {said}.")


@post("/models/unload", status_code=200, name="panel_unload")
async def unload_model(request: PanelRequest) -> Response[str]:
    name = (await form_of(request)).get("model", "")
    await panel_of(request).control.unload(name)
    return done(request, BACK, f"Unloaded {name}.")


async def _rows(panel: Panel) -> list[Row]:
    """What is in memory first."""
    names = panel.control.library.registry.read()
    disk = {model.ref.ref: model for model in await asyncio.to_thread(on_disk, os.environ, names)}
    rows = [
        Row(model.name, model.ref, disk.pop(model.ref, None), model) for model in describe_all(panel.control)
    ]
    return rows + [Row(model.ref.name, ref, model, None) for ref, model in disk.items()]
