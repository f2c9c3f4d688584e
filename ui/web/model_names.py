"""Aliases of a model with their parameters, and its chat template tried on sample messages."""

import asyncio
import os
from typing import Any, Final
from urllib.parse import urlencode

from litestar import MediaType, Response, get, post
from litestar.params import FromQuery

from llmbox.app.aliases import set_alias
from llmbox.app.errors import ApiError, CliError, Exit
from llmbox.app.http.forms import form_of
from llmbox.app.registry import RANGES
from llmbox.app.text.chat_prompt import Chat
from llmbox.app.text.model_text import ModelText, load_model_text
from llmbox.engine.errors import ModelError

from .forms import done, is_fragment
from .model_plan import find_model
from .render import Panel, PanelRequest, page, panel_of, render

SYSTEM: Final = "You answer in few words."
USER: Final = "What is the capital of France?"
LONGEST: Final = 20_000
"""Characters of a sample message."""


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
    return _back(request, ref, f"{name} now stands for this model.")


@post("/models/alias/remove", status_code=200, name="panel_alias_remove")
async def remove_alias(request: PanelRequest) -> Response[str]:
    form = await form_of(request)
    name = form.get("name", "")
    try:
        await asyncio.to_thread(panel_of(request).control.library.registry.remove_alias, name)
    except CliError as error:
        raise ApiError(404, f"{error.what}: {error.why}.", "alias_not_found") from error
    return _back(request, form.get("ref", ""), f"{name} is no alias any more.")


@get("/models/template", name="panel_template")
async def template_preview(
    request: PanelRequest,
    ref: FromQuery[str],
    system: FromQuery[str] = SYSTEM,
    user: FromQuery[str] = USER,
) -> Response[str]:
    """Rendered as a request's is: in the worker that may be killed, with what a client wrote kept text."""
    panel = panel_of(request)
    values = await _rendered(panel, ref, system[:LONGEST], user[:LONGEST])
    if is_fragment(request):
        return Response(render("live/template.html", panel, **values), media_type=MediaType.HTML)
    return page(request, "template.html", "models", ref=ref, system=system, user=user, **values)


async def _rendered(panel: Panel, ref: str, system: str, user: str) -> dict[str, Any]:
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


async def _text(panel: Panel, ref: str) -> ModelText:
    """Of the loaded model, or read from its files. Raises ApiError."""
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
