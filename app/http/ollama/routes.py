"""The Ollama dialect's routes. What changes the disk (pull, delete) stays with `llmbox` and the panel."""

import time
from dataclasses import replace
from typing import Annotated, Any

from litestar import Response, Router, get, post
from litestar.params import Body

from ..disconnect import while_connected
from ..guard import Access
from ..openai.chat import ChatCall
from ..openai.context import Call, HttpRequest
from ..openai.routes import listed_models
from ..openai.translated import prepare_translated
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..sse import EventStreamResponse, StreamOptions
from .answers import Kind, complete, error_line, loaded, stamp, stream
from .fields import ChatRequest, Common, GenerateRequest, Options
from .translate import chat_fields, generate_fields

_LINES = StreamOptions(last=b"", error=error_line, comment=b"", content_type=b"application/x-ndjson")


@get("/api/version", opt={"access": Access.KNOWN}, name="ollama_version", operation_id="ollamaVersion")
async def ollama_version(request: HttpRequest) -> dict[str, str]:
    """The version of llmbox."""
    return {"version": request.app.state.services.version}


@get("/api/tags", opt={"access": Access.KNOWN}, name="ollama_tags", operation_id="ollamaTags")
async def ollama_tags(request: HttpRequest) -> dict[str, Any]:
    """Every model that may be asked for."""
    models = await listed_models(await Call.of(request))
    details = {"format": "safetensors", "family": "", "parameter_size": "", "quantization_level": ""}
    return {
        "models": [
            {"name": each.id, "model": each.id, "modified_at": stamp(each.created), "details": details}
            for each in models
        ]
    }


@post(
    "/api/chat", status_code=200, opt={"access": Access.INFER}, name="ollama_chat", operation_id="ollamaChat"
)
async def ollama_chat(request: HttpRequest, data: Annotated[ChatRequest, Body()]) -> Response[dict[str, Any]]:
    """The model's next message, as Ollama gives it; lines of JSON unless `stream` is false."""
    call = await Call.of(request)
    if not data.messages:
        return await _loaded(call, "chat", data)
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
        return await _loaded(call, "generate", data)
    return await _answered(request, call, "generate", data, generate_fields(data))


async def _loaded(call: Call, kind: Kind, data: Common) -> Response[dict[str, Any]]:
    await call.find_model(data.model.removesuffix(":latest"))
    return Response(loaded(kind, data.model, time.time()))


async def _answered(
    request: HttpRequest, call: Call, kind: Kind, data: Common, plain: dict[str, Any]
) -> Response[dict[str, Any]]:
    streams = data.stream is not False
    with call.recording_refusals():
        chat = await _prepared(call, data, plain)
    chat = replace(chat, generation=replace(chat.generation, stream=streams))
    if streams:
        return EventStreamResponse(stream(call.gateway, chat, kind, data.model), _LINES)
    work = complete(call.gateway, chat, kind, data.model)
    return Response(await while_connected(request.receive, work))


async def _prepared(call: Call, data: Common, plain: dict[str, Any]) -> ChatCall:
    refuse_unsupported(data)
    return await prepare_translated(
        call, plain, _warnings(call, data), "ollama", {"response_format": "format"}
    )


def _warnings(call: Call, data: Common) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    found += unknown_fields(Options, call.plain.get("options") or {}, "options.")
    if data.keep_alive is not None:
        found.append("'keep_alive' has no effect: memory.ttl and llmbox load --ttl decide.")
    if data.options is not None and data.options.num_ctx is not None:
        found.append("'options.num_ctx' has no effect: the window is that of the load.")
    return found


ollama_router = Router(
    path="/", route_handlers=[ollama_version, ollama_tags, ollama_chat, ollama_generate], tags=["Ollama"]
)
