"""Chats and texts of the Ollama dialect, and all its routes together."""

import time
from dataclasses import replace
from typing import Annotated, Any

from litestar import Response, Router, post
from litestar.params import Body

from ..disconnect import while_connected
from ..guard import Access
from ..openai.chat import ChatCall
from ..openai.context import Call, HttpRequest
from ..openai.translated import prepare_translated
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..sse import EventStreamResponse
from .answers import LINES, Kind, complete, nothing_said, stream
from .embed_routes import embed_routes
from .fields import ChatRequest, Common, GenerateRequest, Options
from .keep_alive import keep_for, load_or_unload, seconds_of
from .library_routes import library_routes
from .model_routes import model_routes
from .names import our_name
from .translate import NAMES, chat_fields, generate_fields


@post(
    "/api/chat", status_code=200, opt={"access": Access.INFER}, name="ollama_chat", operation_id="ollamaChat"
)
async def ollama_chat(request: HttpRequest, data: Annotated[ChatRequest, Body()]) -> Response[dict[str, Any]]:
    """The model's next message, as Ollama gives it; lines of JSON unless `stream` is false."""
    call = await Call.of(request)
    if not data.messages:
        return await _without_words(request, call, "chat", data)
    return await _answered(request, call, "chat", data, chat_fields(data))


@post(
    "/api/generate",
    status_code=200,
    opt={"access": Access.INFER},
    name="ollama_generate",
    operation_id="ollamaGenerate",
)
async def ollama_generate(
    request: HttpRequest, data: Annotated[GenerateRequest, Body()]
) -> Response[dict[str, Any]]:
    """The model's answer to one prompt; lines of JSON unless `stream` is false."""
    call = await Call.of(request)
    if not data.prompt:
        return await _without_words(request, call, "generate", data)
    return await _answered(request, call, "generate", data, generate_fields(data))


async def _without_words(
    request: HttpRequest, call: Call, kind: Kind, data: Common
) -> Response[dict[str, Any]]:
    """Nothing is asked: the model is loaded, or unloaded where it is to stay for no time."""
    control = request.app.state.control
    done, more = await load_or_unload(control, call, our_name(data.model), data.keep_alive)
    warnings = _warnings(call, data) + more
    return Response(nothing_said(kind, data.model, time.time(), done, warnings))


async def _answered(
    request: HttpRequest, call: Call, kind: Kind, data: Common, plain: dict[str, Any]
) -> Response[dict[str, Any]]:
    streams = data.stream is not False
    with call.recording_refusals():
        seconds = seconds_of(data.keep_alive)
        chat = await _prepared(call, data, plain)
    warnings = list(chat.warnings)
    if seconds is not None:
        warnings += keep_for(request.app.state.control, call.caller, chat.generation.model.name, seconds)
    chat = replace(chat, generation=replace(chat.generation, stream=streams), warnings=warnings)
    if streams:
        return EventStreamResponse(stream(call.gateway, chat, kind, data.model), LINES)
    work = complete(call.gateway, chat, kind, data.model)
    return Response(await while_connected(request.receive, work))


async def _prepared(call: Call, data: Common, plain: dict[str, Any]) -> ChatCall:
    refuse_unsupported(data)
    names = NAMES | ({"messages": "prompt"} if isinstance(data, GenerateRequest) else {})
    return await prepare_translated(call, plain, _warnings(call, data), "ollama", names)


def _warnings(call: Call, data: Common) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    found += unknown_fields(Options, call.plain.get("options") or {}, "options.")
    if data.options is not None and data.options.num_ctx is not None:
        found.append("'options.num_ctx' has no effect: the window is that of the load.")
    return found


ollama_router = Router(
    path="/",
    route_handlers=[ollama_chat, ollama_generate, *embed_routes, *model_routes, *library_routes],
    tags=["Ollama"],
)
