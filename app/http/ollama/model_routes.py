"""Which models there are, which are in memory, and what is known of one."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

from litestar import get, post
from litestar.params import Body
from litestar.types import ControllerRouterHandler

from ...control.cards import Card, read_card
from ...control.control import Control
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.gateway import context_limit
from ..credentials import identity_of
from ..guard import Access
from ..openai.context import Call, HttpRequest
from ..openai.routes import listed_models
from .answers import stamp
from .fields import ShowRequest
from .names import our_name
from .shapes import (
    Listed,
    OllamaVersion,
    Running,
    RunningModels,
    Shown,
    Tags,
    capabilities,
    details_of,
    model_info,
    parameters,
)

_FOREVER = 292 * 365 * 86_400.0
"""Seconds; as Ollama says it of what stays."""


@get("/api/version", opt={"access": Access.KNOWN}, name="ollama_version", operation_id="ollamaVersion")
async def ollama_version(request: HttpRequest) -> OllamaVersion:
    """The version of llmbox."""
    return OllamaVersion(request.app.state.services.version)


@get("/api/tags", opt={"access": Access.KNOWN}, name="ollama_tags", operation_id="ollamaTags")
async def ollama_tags(request: HttpRequest) -> Tags:
    """Every model that may be asked for."""
    control: Control = request.app.state.control
    names = [model.id for model in await listed_models(await Call.of(request))]
    cards = await _cards(await control.places(names))
    return Tags([_listed(name, card) for name, card in cards.items()])


@get("/api/ps", opt={"access": Access.KNOWN}, name="ollama_ps", operation_id="ollamaPs")
async def ollama_ps(request: HttpRequest) -> RunningModels:
    """Models in memory."""
    control: Control = request.app.state.control
    caller = identity_of(request)
    shown = {}
    for model in control.services.engines.models():
        names = [name for name in (model.name, *sorted(model.aliases)) if caller.may_use_model(name)]
        if names and model.supervisor.info is not None:
            shown[names[0]] = model
    cards = await _cards({name: model.path for name, model in shown.items()})
    return RunningModels([_running(name, shown[name], card) for name, card in cards.items()])


@post(
    "/api/show", status_code=200, opt={"access": Access.KNOWN}, name="ollama_show", operation_id="ollamaShow"
)
async def ollama_show(request: HttpRequest, data: Annotated[ShowRequest, Body()]) -> Shown:
    """What a model is and can do."""
    control: Control = request.app.state.control
    call = await Call.of(request)
    name = our_name(data.asked)
    call.caller.require_model(name)
    cards = await _cards(await control.places([name]))
    if name not in cards:
        raise ApiError(404, f"The model {name!r} does not exist here.", "model_not_found", "model")
    card, alias = cards[name], control.services.aliases().get(name)
    window = next((model.context_window for model in await listed_models(call) if model.id == name), None)
    return Shown(
        details=details_of(card, _weights(control, name)),
        model_info=model_info(card, window),
        capabilities=capabilities(card),
        modified_at=stamp(card.modified),
        template=card.template or "",
        parameters=parameters(card.defaults | (alias.sampling if alias else {}), window),
        system=(alias.system or "") if alias else "",
    )


async def _cards(places: dict[str, Path]) -> dict[str, Card]:
    """Of those whose files are still there."""

    def read() -> dict[str, Card]:
        found = {}
        for name, place in places.items():
            try:
                found[name] = read_card(place)
            except OSError:
                continue
        return found

    return await asyncio.to_thread(read)


def _listed(name: str, card: Card) -> Listed:
    return Listed(
        name=name,
        model=name,
        modified_at=stamp(card.modified),
        size=card.size,
        digest=card.digest,
        details=details_of(card),
    )


def _running(name: str, model: LoadedModel, card: Card) -> Running:
    info = model.supervisor.info
    assert info is not None
    size = info.weights_bytes + info.kv_bytes + info.workspace_bytes
    return Running(
        name=name,
        model=name,
        size=size,
        digest=card.digest,
        details=details_of(card, "" if info.quant == "none" else info.quant),
        expires_at=stamp(time.time() + _left(model)),
        size_vram=size if info.device == "cuda" else 0,
        context_length=context_limit(info),
    )


def _left(model: LoadedModel) -> float:
    """Seconds until it leaves memory."""
    if model.ttl is None or model.pinned:
        return _FOREVER
    return model.ttl if model.busy else max(0.0, model.idle_since + model.ttl - model.clock())


def _weights(control: Control, name: str) -> str:
    """What they were rounded to when it was loaded; empty where they were not."""
    model = control.services.engines.find(control.residency.real_name(name))
    info = None if model is None else model.supervisor.info
    return "" if info is None or info.quant == "none" else info.quant


model_routes: list[ControllerRouterHandler] = [ollama_version, ollama_tags, ollama_ps, ollama_show]
