"""vLLM's routes for LoRA adapters: add one at run time, remove one. For administrators."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

from litestar import MediaType, Router, post
from litestar.params import Body
from msgspec import Meta, Struct

from ..control.controller import DaemonController
from ..errors import ApiError, CliError, Exit
from ..models.adapters import add_adapter, remove_adapter
from .auth.guard import Access, identity_of
from .openai.request_context import HttpRequest
from .openai.request_types import Name

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


@post(
    "/v1/load_lora_adapter",
    status_code=200,
    media_type=MediaType.TEXT,
    name="load_lora_adapter",
    operation_id="loadLoraAdapter",
)
async def load_lora_adapter(request: HttpRequest, data: Annotated[LoadAdapterRequest, Body()]) -> str:
    """Add a LoRA adapter from a folder on the box (vLLM's), as `llmbox lora add` does."""
    control: DaemonController = request.app.state.control
    identity_of(request).require_model(data.lora_name)
    folder = Path(data.lora_path)
    if not folder.is_absolute():
        raise ApiError(
            400,
            "'lora_path' must be the absolute path of a folder on the box.",
            "invalid_value",
            "lora_path",
        )
    try:
        await asyncio.to_thread(_add, control, data, folder)
    except CliError as error:
        raise _answer(error, "lora_name" if error.exit == Exit.CONFLICT else "lora_path") from error
    return f"Success: LoRA adapter '{data.lora_name}' added successfully."


@post(
    "/v1/unload_lora_adapter",
    status_code=200,
    media_type=MediaType.TEXT,
    name="unload_lora_adapter",
    operation_id="unloadLoraAdapter",
)
async def unload_lora_adapter(request: HttpRequest, data: Annotated[UnloadAdapterRequest, Body()]) -> str:
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
