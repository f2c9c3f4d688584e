"""Chat page: conversations kept on this box. Its script uses the API of every client, and the admin API to
save them.
"""

import json
from typing import Final

from litestar import Response, get

from llmbox.app.config.entries import find_price
from llmbox.app.http.admin.models import describe_all

from ..render import PanelRequest, page, panel_of

SAMPLING: Final = (
    ("temperature", "Temperature"),
    ("top_p", "Top p"),
    ("max_tokens", "Max tokens"),
    ("seed", "Seed"),
)
"""(API field, label) of each number that a conversation may set. Empty ones are left to the model."""


@get("/chat", sync_to_thread=False, name="panel_chat")
def chat_page(request: PanelRequest) -> Response[str]:
    panel = panel_of(request)
    services = panel.control.services
    formats = {model.name: model.text.output_format for model in services.engines.models()}
    models = {
        each.name: each.name in formats and formats[each.name].tools is not None
        for each in describe_all(panel.control)
        if each.state in {"ready", "restarting"} and each.chat
    }
    usage = services.settings.usage
    found = {name: find_price(usage.prices, name) for name in models}
    prices = {name: (price.input, price.output) for name, price in found.items() if price is not None}
    return page(
        request,
        "chat.html",
        "chat",
        models=models,
        sampling=SAMPLING,
        url=panel.control.running.url,
        prices=json.dumps(prices),
        currency=usage.currency,
    )
