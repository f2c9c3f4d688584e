"""Models page: models on disk and in memory, search, downloads. Playground page, and chat page, whose script
uses the API of every client, and the admin API to save conversations.
"""

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath, FromQuery

from llmbox.app.config.entries import find_price
from llmbox.app.errors import ApiError, CliError, Exit
from llmbox.app.http.admin.models import describe_all
from llmbox.app.http.server.request import form_of
from llmbox.app.hub.errors import HubError
from llmbox.app.models.catalog import DiskModel, on_disk

from ..render import PageContext, PanelRequest, done, page, panel_of, render
from .model_detail import chosen_settings, options_of

BACK = "/admin/models"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of the list: on disk, in memory, or both."""

    name: str
    ref: str
    disk: DiskModel | None
    loaded: Any | None


@get("/models", name="panel_models")
async def models_page(request: PanelRequest) -> Response[str]:
    return page(request, "models/models.html", "models", rows=await _rows(panel_of(request)))


async def models_pieces(panel: PageContext) -> dict[str, str]:
    return {"installed": render("live/models/installed.html", panel, rows=await _rows(panel))}


@post("/models/load", status_code=200, name="panel_load")
async def load_model(request: PanelRequest) -> Response[str]:
    control = panel_of(request).control
    form = await form_of(request)
    try:
        options = {name.partition(".")[2]: value for name, value in options_of(chosen_settings(form)).items()}
        wanted = await asyncio.to_thread(control.model_request, form.get("model", ""), None, options)
        control.begin_load(wanted)
    except CliError as error:
        status = 404 if error.exit == Exit.NOT_FOUND else 400
        raise ApiError(status, f"{error.what}: {error.why}", "bad_model", "model") from error
    return done(request, BACK, f"Loading {wanted.served_name}.")


@post("/models/pin", status_code=200, name="panel_pin")
async def pin_model(request: PanelRequest) -> Response[str]:
    """Pin or unpin a model. A pinned one is neither evicted for others nor unloaded when idle."""
    form = await form_of(request)
    name, pinned = form.get("model", ""), form.get("pinned") == "1"
    panel_of(request).control.residency.pin(name, pinned=pinned)
    said = "stays in memory" if pinned else "may be evicted when idle"
    return done(request, BACK, f"{name} {said}.")


@post("/models/unload", status_code=200, name="panel_unload")
async def unload_model(request: PanelRequest) -> Response[str]:
    name = (await form_of(request)).get("model", "")
    await panel_of(request).control.unload(name)
    return done(request, BACK, f"Unloaded {name}.")


async def _rows(panel: PageContext) -> list[ModelRow]:
    """Return the rows of the list, models in memory first."""
    names = panel.control.library.registry.read()
    disk = {model.ref.ref: model for model in await asyncio.to_thread(on_disk, os.environ, names)}
    rows = [
        ModelRow(model.name, model.ref, disk.pop(model.ref, None), model)
        for model in describe_all(panel.control)
    ]
    return rows + [ModelRow(model.ref.name, ref, model, None) for ref, model in disk.items()]


ACTIVITY = "/admin/models/activity"
HITS = 20
PURPOSES = {
    "chat": "Chat",
    "code": "Code",
    "vision": "Vision: texts about images",
    "embedding": "Embeddings",
    "reranking": "Reranking",
    "tiny": "Tiny: for trials and small machines",
}
"""Headings of the recommended models, in their order on the page."""


@post("/models/refresh-recommended", status_code=200, name="panel_refresh_recommended")
async def refresh_recommended(request: PanelRequest) -> Response[str]:
    try:
        count, failed = await panel_of(request).control.library.refresh_recommended()
    except HubError as error:
        raise ApiError(502, f"{error.what}: {error.why}. {error.fix}", error.code) from error
    left = f" The hub did not describe {', '.join(failed)}: their entries are unchanged." if failed else ""
    return done(request, "/admin/models/discover", f"Refreshed {count} models.{left}")


@get("/models/discover", name="panel_discover")
async def discover_page(request: PanelRequest, text: FromQuery[str] = "") -> Response[str]:
    hits, problem, recommended = [], "", []
    if not text.strip():
        recommended = await panel_of(request).control.library.recommend()
    else:
        try:
            hits = await panel_of(request).control.library.search(text.strip(), HITS)
        except HubError as error:
            problem = " ".join(part for part in (f"{error.what}: {error.why}.", error.fix) if part)
    return page(
        request,
        "models/discover.html",
        "models",
        text=text,
        hits=hits,
        problem=problem,
        recommended=recommended,
        purposes=PURPOSES,
    )


@get("/models/activity", sync_to_thread=False, name="panel_activity")
def activity_page(request: PanelRequest) -> Response[str]:
    return page(request, "models/activity.html", "models", downloads=downloads_of(panel_of(request)))


async def activity_pieces(panel: PageContext) -> dict[str, str]:
    return {"downloads": render("live/models/downloads.html", panel, downloads=downloads_of(panel))}


@post("/models/pull", status_code=200, name="panel_pull")
async def pull(request: PanelRequest) -> Response[str]:
    form = await form_of(request)
    name = form.get("model", "").strip()
    panel_of(request).control.library.downloads.start(name, anyway=bool(form.get("anyway")))
    return done(request, ACTIVITY, f"Downloading {name}: see Activity.")


@post("/models/download/{what:str}", status_code=200, name="panel_download")
async def change_download(request: PanelRequest, what: FromPath[str]) -> Response[str]:
    downloads = panel_of(request).control.library.downloads
    name = (await form_of(request)).get("model", "")
    if what == "pause":
        downloads.pause(name)
    elif what == "resume":
        downloads.resume(name)
    elif what == "cancel":
        await downloads.cancel(name)
    elif what == "dismiss":
        await downloads.dismiss(name)
    else:
        raise ApiError(404, "Downloads can be paused, resumed, cancelled and dismissed.", "not_found")
    said = {
        "pause": "Paused",
        "resume": "Resumed",
        "cancel": "Cancelled",
        "dismiss": "Removed from the list:",
    }[what]
    return done(request, ACTIVITY, f"{said} {name}.")


def downloads_of(panel: PageContext) -> list[dict[str, object]]:
    """Return the downloads, newest first."""
    return [each.as_dict(with_files=False) for each in reversed(panel.control.library.downloads.all())]


PARAMETERS: Final = (
    ("max_tokens", "Max tokens", "512"),
    ("temperature", "Temperature", ""),
    ("top_p", "Top p", ""),
    ("top_k", "Top k", ""),
    ("min_p", "Min p", ""),
    ("presence_penalty", "Presence penalty", ""),
    ("frequency_penalty", "Frequency penalty", ""),
    ("repetition_penalty", "Repetition penalty", ""),
    ("seed", "Seed", ""),
)
"""(API field, label, initial value) of each number. Empty fields are left to the model."""


@get("/playground", sync_to_thread=False, name="panel_playground")
def playground_page(
    request: PanelRequest, model: FromQuery[str] = "", other: FromQuery[str] = ""
) -> Response[str]:
    panel = panel_of(request)
    ready = [each for each in describe_all(panel.control) if each.state in {"ready", "restarting"}]
    return page(
        request,
        "playground.html",
        "playground",
        models=ready,
        chosen=model,
        other=other,
        parameters=PARAMETERS,
        url=panel.control.running.url,
    )


SAMPLING: Final = (
    ("temperature", "Temperature"),
    ("top_p", "Top p"),
    ("max_tokens", "Max tokens"),
    ("seed", "Seed"),
)
"""(API field, label) of each number that a conversation may set. Empty ones are left to the model."""


async def _is_on_disk(panel: PageContext, name: str) -> bool:
    found = await asyncio.to_thread(on_disk, os.environ, panel.control.library.registry.read())
    return any(each.servable and each.ref.name == name for each in found)


@get("/chat", name="panel_chat")
async def chat_page(request: PanelRequest, model: FromQuery[str] = "") -> Response[str]:
    """Show the chat. `model` is the one to begin with; one that is on disk is loaded by the first message."""
    panel = panel_of(request)
    services = panel.control.services
    formats = {model.name: model.text.output_format for model in services.engines.models()}
    models = {
        each.name: each.name in formats and formats[each.name].tools is not None
        for each in describe_all(panel.control)
        if each.state in {"ready", "restarting"} and each.chat
    }
    sees = {
        each.name
        for each in services.engines.models()
        if (info := each.supervisor.info) and not info.image_problem
    }
    for name, alias in panel.control.library.registry.read_or_nothing().aliases.items():
        base = panel.control.residency.real_name(name)
        if not alias.adapter or (base not in models and services.engines.knows(base)):
            continue
        if await panel.control.residency.is_available(name):
            models[name] = models.get(base, False)  # one of a base on disk is loaded by the first message
            if base in sees:
                sees.add(name)
    waits = bool(model) and model not in models and await _is_on_disk(panel, model)
    if waits:
        models = {model: False, **models}
    usage = services.settings.usage
    found = {name: find_price(usage.prices, name) for name in models}
    prices = {name: (price.input, price.output) for name, price in found.items() if price is not None}
    return page(
        request,
        "chat.html",
        "chat",
        models=models,
        sees=sees,
        chosen=model,
        waits=waits,
        sampling=SAMPLING,
        url=panel.control.running.url,
        prices=json.dumps(prices),
        currency=usage.currency,
    )
