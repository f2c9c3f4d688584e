"""Model management of the Ollama dialect: pull, delete, copy, list, show."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Annotated, Any

from litestar import Response, delete, get, post
from litestar.params import Body
from litestar.types import ControllerRouterHandler

from ...control.controller import DaemonController
from ...control.library import STATUS_OF_EXIT, LocalModelFacts, read_card
from ...engines.admission import model_not_found
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError, CliError, Exit, missing_parameter
from ...gateway.gateway import context_limit
from ...hub.download import Download
from ...hub.errors import HubError
from ...lifecycle.drain import shutting_down
from ...models.adapters import set_alias
from ...models.catalog import HUB_ID, hub_cache
from ...util.formatting import rfc3339
from ..auth.guard import Access, identity_of
from ..openai.request_context import RequestContext
from ..openai.routes import listed_models
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..server.errors import error_type
from ..server.request import StrictRequest
from ..server.sse import EventStreamResponse, while_connected
from .calls import alias_parameters
from .request_types import (
    CopyRequest,
    CreateRequest,
    DeleteRequest,
    OllamaPullRequest,
    ShowRequest,
    normalize_name,
)
from .responder import (
    LINES,
    OllamaModelEntry,
    OllamaModelList,
    OllamaRunningModel,
    OllamaShowResponse,
    OllamaVersion,
    RunningModels,
    capabilities,
    details_of,
    line,
    model_info,
    parameters,
)

_SHA256_DIGITS = 64
_STATUS_OF = {"repo_not_found": 404, "no_weights": 404, "repo_gated": 403, "bad_token": 403}
_OURS = {"does_not_fit", "unsupported_model", "disk_full"}
INSTEAD = {
    "blobs": "llmbox accepts no model files over its API. Use llmbox adopt for a folder of safetensors.",
    "push": "llmbox publishes nothing. Models are uploaded with the tools of the Hugging Face hub.",
}


@post("/api/pull", status_code=200, opt={"access": Access.ADMIN}, operation_id="ollamaPull")
async def ollama_pull(
    request: StrictRequest, data: Annotated[OllamaPullRequest, Body()]
) -> Response[dict[str, Any]]:
    """Fetch a model of the Hugging Face hub; lines of JSON unless `stream` is false.

    The download continues if the client disconnects.
    """
    call = await RequestContext.of(request)
    name = normalize_name(data.requested_name)
    call.caller.require_model(name)
    steps = await _steps(request.app.state.control, name, _warnings(call, data))
    if data.stream is not False:
        return EventStreamResponse((line(step) async for step in steps), LINES)
    return Response(await while_connected(request.receive, _last(steps)))


@delete("/api/delete", status_code=200, opt={"access": Access.ADMIN}, operation_id="ollamaDelete")
async def ollama_delete(request: StrictRequest, data: Annotated[DeleteRequest, Body()]) -> None:
    """Delete a model from the disk. One that is in memory or being downloaded is refused. Of an alias only
    the name is deleted.
    """
    control: DaemonController = request.app.state.control
    call = await RequestContext.of(request)
    name = normalize_name(data.requested_name)
    call.caller.require_model(name)
    registry = control.library.registry
    if name in registry.read_or_nothing().aliases:
        await asyncio.to_thread(registry.remove_alias, name)
    else:
        await control.library.remove([name])


@post("/api/copy", status_code=200, opt={"access": Access.ADMIN}, operation_id="ollamaCopy")
async def ollama_copy(request: StrictRequest, data: Annotated[CopyRequest, Body()]) -> None:
    """Create another name for a model: an alias. No files are copied."""
    control: DaemonController = request.app.state.control
    call = await RequestContext.of(request)
    source, destination = normalize_name(data.source), normalize_name(data.destination)
    for name in (source, destination):
        call.caller.require_model(name)
    await _set_alias(control, source, destination, ("source", "destination"), {})


@post("/api/create", status_code=200, opt={"access": Access.ADMIN}, operation_id="ollamaCreate")
async def ollama_create(
    request: StrictRequest, data: Annotated[CreateRequest, Body()]
) -> Response[dict[str, Any]]:
    """Create a name for a model with parameters and a system prompt of its own: an alias."""
    call = await RequestContext.of(request)
    refuse_unsupported(data)
    if data.from_ is None:
        raise missing_parameter("from")
    source, name = normalize_name(data.from_), normalize_name(data.requested_name)
    for each in (source, name):
        call.caller.require_model(each)
    parameters, warnings = alias_parameters(call, data)
    if data.system:
        parameters["system"] = data.system
    await _set_alias(request.app.state.control, source, name, ("from", "model"), parameters)
    done = {"status": "success"} | ({"warnings": warnings} if warnings else {})
    if data.stream is not False:
        return EventStreamResponse((line(step) async for step in _at_once(done)), LINES)
    return Response(done)


async def _set_alias(
    control: DaemonController,
    source: str,
    name: str,
    fields: tuple[str, str],
    parameters: Mapping[str, Any],
) -> None:
    """Create the alias `name`. That of an alias has its parameters too.

    Raises ApiError for a name that is invalid; `fields` are those that gave `source` and `name`.
    """

    def change() -> None:
        registry = control.library.registry
        known = registry.read().aliases.get(source)
        if known is not None and known.adapter:
            raise CliError(
                f"{source} is an adapter",
                "it has one name",
                "llmbox lora add gives it another",
                Exit.CONFLICT,
            )
        kept = {**(known.parameters if known else {}), **parameters}
        target = known.model if known else source
        words = [f"{key}={value}" for key, value in kept.items()]
        set_alias(registry, os.environ, name, target, words, control.in_memory())

    try:
        await asyncio.to_thread(change)
    except CliError as error:
        status = STATUS_OF_EXIT.get(error.exit, 400)
        code, param = ("model_not_found", fields[0]) if status == 404 else ("bad_alias", fields[1])
        raise ApiError(status, f"{error.what}: {error.why}.", code, param) from error


@post(["/api/push", "/api/blobs/{digest:str}"], opt={"access": Access.KNOWN}, include_in_schema=False)
async def ollama_not_here(request: StrictRequest) -> None:
    raise ApiError(400, INSTEAD[request.scope["path"].split("/")[2]], "unsupported_route")


async def _steps(
    control: DaemonController, name: str, warnings: list[str]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the lines of a pull. Raises ApiError for an invalid name before the first line."""
    done = {"status": "success"} | ({"warnings": warnings} if warnings else {})
    if HUB_ID.fullmatch(name) is None and await control.places([name]):
        return _at_once(done)  # built in, adopted, or an alias
    return follow_pull(control, control.library.downloads.start(name), done)


async def _at_once(done: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield done


async def follow_pull(
    control: DaemonController, download: Download, done: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the lines of a download, `done` at its end. Raises ApiError where it fails or is stopped."""
    yield {"status": "pulling manifest"}
    reported: dict[str, int] = {}
    async for state in control.library.downloads.follow(download):
        if state.active and control.services.drain.draining:
            raise shutting_down()
        for step in _progress(state):
            if reported.get(step["digest"]) != step["completed"]:
                reported[step["digest"]] = step["completed"]
                yield step
    if download.state != "ready":
        raise _refusal(download)
    yield done


def _progress(download: Download) -> list[dict[str, Any]]:
    """Return progress lines of files with a SHA-256 (weights and the like); the hub has none for
    other files.
    """
    return [
        {
            "status": f"pulling {file.etag[:12]}",
            "digest": f"sha256:{file.etag}",
            "total": file.size,
            "completed": progress.done,
        }
        for file, progress in download.files.items()
        if len(file.etag) == _SHA256_DIGITS
    ]


def _refusal(download: Download) -> ApiError:
    error = download.error
    if error is None:
        return ApiError(409, f"The download of {download.model} was {download.state}.", "download_state")
    return _to_api_error(error)


def _to_api_error(error: HubError) -> ApiError:
    status = 400 if error.code in _OURS else _STATUS_OF.get(error.code, 502)
    message = f"{error}. Fix: {error.fix}" if error.fix else str(error)
    message = message.replace(str(hub_cache(os.environ)), "the model cache")  # no paths to clients
    return ApiError(status, message, error.code, "model", error_type(status))


async def _last(steps: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    step: dict[str, Any] = {}
    async for step in steps:  # noqa: B007 - the last one counts
        pass
    return step


def _warnings(call: RequestContext, data: OllamaPullRequest) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    if data.insecure:
        found.append("'insecure' has no effect: every file's hash is checked.")
    return found


library_routes: list[ControllerRouterHandler] = [
    ollama_pull,
    ollama_delete,
    ollama_copy,
    ollama_create,
    ollama_not_here,
]


_API_VERSION = "0.12.11"
"""Version of Ollama whose routes and fields are served here. Clients refuse older ones: GitHub Copilot in
VS Code those before 0.6.4, so llmbox's own number would shut them out.
"""
_FOREVER = 292 * 365 * 86_400.0
"""Seconds; as Ollama says it of what stays."""


@get("/api/version", opt={"access": Access.KNOWN}, operation_id="ollamaVersion")
async def ollama_version() -> OllamaVersion:
    """Return the version of Ollama whose API is served here, which clients compare with what they need."""
    return OllamaVersion(_API_VERSION)


@get("/api/tags", opt={"access": Access.KNOWN}, operation_id="ollamaTags")
async def ollama_tags(request: StrictRequest) -> OllamaModelList:
    """List every model that may be requested."""
    control: DaemonController = request.app.state.control
    names = [model.id for model in await listed_models(await RequestContext.of(request))]
    cards = await _cards(await control.places(names))
    return OllamaModelList([_listed(name, card) for name, card in cards.items()])


@get("/api/ps", opt={"access": Access.KNOWN}, operation_id="ollamaPs")
async def ollama_ps(request: StrictRequest) -> RunningModels:
    """List the models in memory."""
    control: DaemonController = request.app.state.control
    caller = identity_of(request)
    shown = {}
    for model in control.services.engines.models():
        names = [name for name in (model.name, *sorted(model.aliases)) if caller.may_use_model(name)]
        if names and model.supervisor.info is not None:
            shown[names[0]] = model
    cards = await _cards({name: model.path for name, model in shown.items()})
    return RunningModels([_running(name, shown[name], card) for name, card in cards.items()])


@post("/api/show", status_code=200, opt={"access": Access.KNOWN}, operation_id="ollamaShow")
async def ollama_show(request: StrictRequest, data: Annotated[ShowRequest, Body()]) -> OllamaShowResponse:
    """Describe a model and its capabilities."""
    control: DaemonController = request.app.state.control
    call = await RequestContext.of(request)
    name = normalize_name(data.requested_name)
    call.caller.require_model(name)
    cards = await _cards(await control.places([name]))
    if name not in cards:
        raise model_not_found(name)
    card, alias = cards[name], control.services.aliases().get(name)
    window = next((model.context_window for model in await listed_models(call) if model.id == name), None)
    return OllamaShowResponse(
        details=details_of(card, _weights(control, name)),
        model_info=model_info(card, window),
        capabilities=capabilities(card),
        modified_at=rfc3339(card.modified),
        template=card.template or "",
        parameters=parameters(card.defaults | (alias.sampling if alias else {}), window),
        system=(alias.system or "") if alias else "",
    )


async def _cards(places: dict[str, Path]) -> dict[str, LocalModelFacts]:
    """Return the cards of models whose files still exist."""

    def read() -> dict[str, LocalModelFacts]:
        found = {}
        for name, place in places.items():
            try:
                found[name] = read_card(place)
            except OSError:
                continue
        return found

    return await asyncio.to_thread(read)


def _listed(name: str, card: LocalModelFacts) -> OllamaModelEntry:
    return OllamaModelEntry(
        name=name,
        model=name,
        modified_at=rfc3339(card.modified),
        size=card.size,
        digest=card.digest,
        details=details_of(card),
    )


def _running(name: str, model: LoadedModel, card: LocalModelFacts) -> OllamaRunningModel:
    info = model.info
    size = info.weights_bytes + info.kv_bytes + info.workspace_bytes
    return OllamaRunningModel(
        name=name,
        model=name,
        size=size,
        digest=card.digest,
        details=details_of(card, "" if info.quant == "none" else info.quant),
        expires_at=rfc3339(time.time() + _left(model)),
        size_vram=size if info.device == "cuda" else 0,
        context_length=context_limit(info),
    )


def _left(model: LoadedModel) -> float:
    """Return the seconds until the model leaves memory."""
    if model.ttl is None or model.pinned:
        return _FOREVER
    return model.ttl if model.busy else max(0.0, model.idle_since + model.ttl - model.clock())


def _weights(control: DaemonController, name: str) -> str:
    """Return the quantization that was applied at load; empty for weights loaded as they are."""
    model = control.services.engines.find(control.residency.real_name(name))
    info = None if model is None else model.supervisor.info
    return "" if info is None or info.quant == "none" else info.quant


model_routes: list[ControllerRouterHandler] = [ollama_version, ollama_tags, ollama_ps, ollama_show]
