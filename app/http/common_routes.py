"""Routes that every dialect shares: health, readiness, metrics, load, and vLLM's for LoRA adapters."""

import asyncio
import os
import platform
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from litestar import MediaType, Response, Router, get, post, route
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import Body
from litestar.types import ControllerRouterHandler
from msgspec import Meta, Struct

from ..control.controller import DaemonController, Failure
from ..engines.loaded_model import Readiness
from ..errors import ApiError, CliError, Exit
from ..gateway.gateway import context_limit
from ..metrics import CONTENT_TYPE
from ..models.adapters import add_adapter, remove_adapter
from ..security.security import Identity
from ..util.formatting import hide_folders
from .admin.models import begin_load
from .admin.schema import LoadRequest, UnloadedModels
from .auth.guard import Access, identity_of
from .openai.request_types import Name
from .openai.response_types import ModelCard
from .server.errors import card_page, error_type, wants_page
from .server.request import StrictRequest
from .server.sse import while_connected

INDEX = """<p>This machine serves language models.</p>
<p><a class="button main" href="/admin">Open the panel</a></p>
<dl class="rows">
<div><dt>OpenAI's API</dt><dd><code>/v1</code></dd></div>
<div><dt>Anthropic's API</dt><dd><code>/v1/messages</code></dd></div>
<div><dt>Ollama's API</dt><dd><code>/api</code></dd></div>
<div><dt>All routes</dt><dd><a href="/openapi.json"><code>/openapi.json</code></a></dd></div>
<div><dt>Health</dt><dd><a href="/ready"><code>/ready</code></a></dd></div>
</dl>"""
"""Page for people, inside its card."""
OLLAMA = "Ollama is running"
"""Text that Ollama's clients look for, to the letter."""


class Health(msgspec.Struct):
    status: Literal["ok"]


class ModelAnswers(msgspec.Struct):
    """Readiness of one model that is in memory, is being loaded or failed to load."""

    name: str
    state: str
    """`ready`, `loading`, `restarting` or `failed`."""
    cause: str
    """Reason why the model does not answer; empty where it does."""


class ReadyAnswer(msgspec.Struct):
    status: Literal["ready", "not_ready"]
    cause: str
    """The first thing that is wrong, also while other models answer."""
    models: list[ModelAnswers]


class ServerLoad(msgspec.Struct):
    server_load: int
    """Requests that are open: running, waiting, or being answered."""


class Version(msgspec.Struct):
    version: str
    python: str


@get("/", media_type=MediaType.TEXT, sync_to_thread=False, opt={"access": Access.LIVENESS})
def index(request: StrictRequest) -> Response[str]:
    """Return a start page to browsers, and to programs the text that Ollama's clients look for."""
    is_page = wants_page(request)
    body, kind = (card_page("Serving", INDEX), MediaType.HTML) if is_page else (OLLAMA, MediaType.TEXT)
    return Response(body, media_type=kind, headers={"Vary": "Accept"})


@get("/health", sync_to_thread=False, opt={"access": Access.LIVENESS})
def health() -> Health:
    """Report that the daemon's event loop answers."""
    return Health("ok")


@route(
    "/ping",
    http_method=["GET", "POST"],
    status_code=200,
    sync_to_thread=False,
    opt={"access": Access.LIVENESS},
)
def ping() -> Health:
    """Report liveness under the path that SageMaker's and vLLM's clients use."""
    return Health("ok")


@get("/load", sync_to_thread=False, opt={"access": Access.KNOWN})
def server_load(request: StrictRequest) -> ServerLoad:
    """Return the number of requests under way, for load balancers (vLLM's)."""
    return ServerLoad(request.services.gateway.open_count)


@get(
    "/ready",
    sync_to_thread=False,
    opt={"access": Access.KNOWN},
    responses={503: ResponseSpec(ReadyAnswer, description="The named cause", generate_examples=False)},
)
def ready(request: StrictRequest) -> Response[ReadyAnswer]:
    """Report whether any model answers, and each model's state. 503 names the cause. Without a model in
    memory the box is ready, unless an operator's load is under way or the first one failed.
    """
    services = request.services
    if services.drain.draining:
        body = ReadyAnswer("not_ready", "draining: the daemon is shutting down", [])
    else:
        body = _ready_answer(services.engines.readiness(), identity_of(request))
    if body.status == "ready":
        return Response(body)
    return Response(body, status_code=503, headers={"Retry-After": "1"})


def _ready_answer(readiness: Readiness, caller: Identity) -> ReadyAnswer:
    """Build the answer of `ready` with the models that the caller may use. Only admins see paths."""
    shown = [model for model in readiness.models if caller.may_use_model(model.name)]
    cause = readiness.cause
    if len(shown) < len(readiness.models):
        hidden = "" if readiness.ready else "no model answers"
        cause = next((model.problem for model in shown if model.problem), hidden)
    if not readiness.models:
        cause = cause or "no model is loaded"
    show = str if caller.may("admin") else hide_folders
    return ReadyAnswer(
        "ready" if readiness.ready else "not_ready",
        show(cause),
        [ModelAnswers(model.name, model.state, show(model.cause)) for model in shown],
    )


@get("/metrics", media_type=CONTENT_TYPE, sync_to_thread=False, opt={"access": Access.READ})
def metrics(request: StrictRequest) -> bytes:
    """Return Prometheus text under vLLM's names."""
    return request.services.metrics.render()


@get("/version", sync_to_thread=False, opt={"access": Access.KNOWN})
def version(request: StrictRequest) -> Version:
    return Version(request.services.version, platform.python_version())


common_routes: list[ControllerRouterHandler] = [index, health, ping, server_load, ready, metrics, version]


class UnloadOneRequest(Struct, forbid_unknown_fields=True):
    model: Name


@post("/v1/load", status_code=200, operation_id="loadModel")
async def load(request: StrictRequest, data: Annotated[LoadRequest, Body()]) -> Response[ModelCard]:
    """Load a model that is on disk, and answer once it is ready. Loading outlasts the connection."""
    control: DaemonController = request.app.state.control
    identity_of(request).require_model(data.model)
    wanted, loading = await begin_load(control, data)
    failure = await while_connected(request.receive, _outcome(loading))
    if failure is not None:
        cause = hide_folders(failure.cause, wanted.ref.path)
        kind, headers = error_type(failure.status), dict(failure.headers)
        raise ApiError(failure.status, cause, failure.code, "model", kind, headers)
    model = control.services.engines.find(wanted.served_name)
    if model is None or model.supervisor.info is None:
        raise _gone()
    limit = context_limit(model.supervisor.info)
    card = ModelCard(id=model.name, created=int(model.loaded_at), context_window=limit, max_model_len=limit)
    return Response(card)


@post("/v1/unload", status_code=200, operation_id="unloadModel")
async def unload(request: StrictRequest, data: Annotated[UnloadOneRequest, Body()]) -> UnloadedModels:
    """Unload a model from memory. Requests that it is answering end with an error."""
    control: DaemonController = request.app.state.control
    identity_of(request).require_model(data.model)
    return UnloadedModels(await control.unload(data.model))


async def _outcome(loading: "asyncio.Task[Failure | None]") -> Failure | None:
    await asyncio.wait({loading})  # the client may leave: the load goes on
    if loading.cancelled():
        raise _gone()
    return loading.result()


def _gone() -> ApiError:
    return ApiError(409, "The model was unloaded while it was being loaded.", "model_unloaded", "model")


memory_router = Router(path="/", route_handlers=[load, unload], opt={"access": Access.ADMIN}, tags=["Memory"])


_STATUS = {Exit.NOT_FOUND: (404, "model_not_found"), Exit.CONFLICT: (409, "name_in_use")}


class LoadAdapterRequest(Struct, kw_only=True):
    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Absolute path of a folder on the box."""
    base_model_name: Name | None = None
    """Base; default is the one that the adapter names, or else the only model in memory."""
    load_inplace: bool = False
    """Replace an adapter of this name."""


class UnloadAdapterRequest(Struct, kw_only=True):
    lora_name: Name
    lora_int_id: int | None = None
    """Not read: names are unique."""


@post("/v1/load_lora_adapter", status_code=200, media_type=MediaType.TEXT, operation_id="loadLoraAdapter")
async def load_lora_adapter(request: StrictRequest, data: Annotated[LoadAdapterRequest, Body()]) -> str:
    """Add a LoRA adapter from a folder on the box (vLLM's), as `llmbox lora add` does."""
    control: DaemonController = request.app.state.control
    identity_of(request).require_model(data.lora_name)
    folder = Path(data.lora_path)
    if not folder.is_absolute():
        raise ApiError(
            400,
            "'lora_path' must be the absolute path of a folder on the server.",
            "invalid_value",
            "lora_path",
        )
    try:
        await asyncio.to_thread(_add, control, data, folder)
    except CliError as error:
        raise _answer(error, "lora_name" if error.exit == Exit.CONFLICT else "lora_path") from error
    return f"Success: LoRA adapter '{data.lora_name}' added successfully."


@post("/v1/unload_lora_adapter", status_code=200, media_type=MediaType.TEXT, operation_id="unloadLoraAdapter")
async def unload_lora_adapter(request: StrictRequest, data: Annotated[UnloadAdapterRequest, Body()]) -> str:
    """Remove a LoRA adapter (vLLM's), as `llmbox lora rm` does. Requests that run with it finish."""
    control: DaemonController = request.app.state.control
    identity_of(request).require_model(data.lora_name)
    try:
        await asyncio.to_thread(remove_adapter, control.library.registry, data.lora_name)
    except CliError as error:
        raise _answer(error, "lora_name") from error
    return f"Success: LoRA adapter '{data.lora_name}' removed successfully."


def _add(control: DaemonController, data: LoadAdapterRequest, folder: Path) -> None:
    registry, memory = control.library.registry, control.in_memory()
    base = data.base_model_name
    names = {ref.path for ref in memory.values()}
    if base is None and len(names) == 1:  # as in vLLM, which serves one model
        base = next(iter(memory))
    add_adapter(registry, os.environ, data.lora_name, folder, base, memory, may_replace=data.load_inplace)


def _answer(error: CliError, param: str) -> ApiError:
    status, code = _STATUS.get(error.exit, (400, "bad_adapter"))
    return ApiError(status, f"{error.what}: {error.why}", code, param)


adapter_router = Router(
    path="/",
    route_handlers=[load_lora_adapter, unload_lora_adapter],
    opt={"access": Access.ADMIN},
    tags=["Memory"],
)
