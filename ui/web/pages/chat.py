"""Chat page: conversations kept on this box. Its script uses the API of every client, and the admin API to
save them.
"""

import asyncio
import json
import os
from typing import Final

from litestar import Response, get
from litestar.params import FromQuery

from llmbox.app.config.entries import find_price
from llmbox.app.http.admin.models import describe_all
from llmbox.app.models.catalog import on_disk

from ..render import Panel, PanelRequest, page, panel_of

SAMPLING: Final = (
    ("temperature", "Temperature"),
    ("top_p", "Top p"),
    ("max_tokens", "Max tokens"),
    ("seed", "Seed"),
)
"""(API field, label) of each number that a conversation may set. Empty ones are left to the model."""


async def _is_on_disk(panel: Panel, name: str) -> bool:
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
