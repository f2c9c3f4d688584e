"""Chat and generate routes of the Ollama dialect, and the list of all its routes."""

import time
from typing import Annotated, Any

from litestar import Response, Router, post
from litestar.params import Body

from ..auth.guard import Access
from ..openai.request_context import HttpRequest, RequestContext
from ..server.sse import EventStreamResponse, while_connected
from .calls import find_warnings, prepare_ollama
from .embed_routes import embed_routes
from .keep_alive import keep_for, load_or_unload, seconds_of
from .model_routes import library_routes, model_routes
from .request_types import ChatRequest, Common, GenerateRequest, normalize_name
from .responder import LINES, Kind, build_empty_answer, complete, stream


@post(
    "/api/chat", status_code=200, opt={"access": Access.INFER}, name="ollama_chat", operation_id="ollamaChat"
)
async def ollama_chat(request: HttpRequest, data: Annotated[ChatRequest, Body()]) -> Response[dict[str, Any]]:
    """Generate the model's next message in Ollama's shape; lines of JSON unless `stream` is false."""
    call = await RequestContext.of(request)
    if not data.messages:
        return await _answer_without_prompt(request, call, "chat", data)
    return await _answered(request, call, "chat", data)


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
    """Generate the model's answer to one prompt; lines of JSON unless `stream` is false."""
    call = await RequestContext.of(request)
    if not (data.prompt or data.suffix):
        return await _answer_without_prompt(request, call, "generate", data)
    return await _answered(request, call, "generate", data)


async def _answer_without_prompt(
    request: HttpRequest, call: RequestContext, kind: Kind, data: Common
) -> Response[dict[str, Any]]:
    """Answer a request without a prompt: load the model, or unload it where `keep_alive` is 0."""
    control = request.app.state.control
    done, more = await load_or_unload(control, call, normalize_name(data.model), data.keep_alive)
    warnings = find_warnings(call, data) + more
    return Response(build_empty_answer(kind, data.model, time.time(), done, warnings))


async def _answered(
    request: HttpRequest, call: RequestContext, kind: Kind, data: ChatRequest | GenerateRequest
) -> Response[dict[str, Any]]:
    with call.recording_refusals():
        seconds = seconds_of(data.keep_alive)
        asked = await prepare_ollama(call, data)
    if seconds is not None:
        control, name = request.app.state.control, asked.generation.model.name
        asked.prepared.warnings.extend(keep_for(control, call.caller, name, seconds))
    if asked.generation.stream:
        return EventStreamResponse(stream(call.gateway, asked, kind, data.model), LINES)
    work = complete(call.gateway, asked, kind, data.model)
    return Response(await while_connected(request.receive, work))


ollama_router = Router(
    path="/",
    route_handlers=[ollama_chat, ollama_generate, *embed_routes, *model_routes, *library_routes],
    tags=["Ollama"],
)
