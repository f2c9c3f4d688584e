"""Models on this disk, downloads, and whether a model would fit, as in `llmbox ls` and `llmbox fit`."""

import asyncio
import os
from dataclasses import asdict
from typing import Annotated, Any

from litestar import get, post
from litestar.params import FromQuery, JSONBody, QueryParameter
from msgspec import Struct

from llmbox.engine.errors import DeviceError

from ...control.controller import DaemonController
from ...control.library import Library
from ...errors import ApiError, CliError, Exit
from ...hub.errors import HubError
from ...models.catalog import on_disk
from ..server.request import StrictRequest


@get("/disk")
async def disk(request: StrictRequest) -> dict[str, Any]:
    control: DaemonController = request.app.state.control
    return {"models": await asyncio.to_thread(_on_disk, control)}


@get("/fit")
async def fit(
    request: StrictRequest, model: FromQuery[str], probe: FromQuery[bool] = False
) -> dict[str, Any]:
    """Report whether a model fits, with the daemon's settings. For a model on the hub only its config and
    headers are read.

    `words` has the same as texts by name; `probe` measures the memory bandwidth again.
    """
    control: DaemonController = request.app.state.control
    try:
        return await asyncio.to_thread(_fit, control, model, probe=probe)
    except DeviceError as error:
        raise ApiError(400, f"{error}.", error.code) from error
    except CliError as error:
        status = 404 if error.exit == Exit.NOT_FOUND else 400
        raise ApiError(status, f"{error.what}: {error.why}", "cannot_tell", "model") from error


def _on_disk(control: DaemonController) -> list[dict[str, Any]]:
    return [
        {
            "name": model.ref.name,
            "ref": model.ref.ref,
            "source": model.ref.source,
            "size": model.size,
            "modified": model.modified,
            "architecture": model.architecture,
            "servable": model.servable,
        }
        for model in on_disk(os.environ, control.library.registry.read())
    ]


def _fit(control: DaemonController, model: str, *, probe: bool) -> dict[str, Any]:
    from ...control.kv_cache import limit_bytes  # noqa: PLC0415
    from ...fit.report import fit_rows, verdict  # noqa: PLC0415
    from ...hub.model_info import find_facts  # noqa: PLC0415 - imports what only this needs
    from ...models.load_request import ModelRequest  # noqa: PLC0415

    facts, ref = find_facts(model, os.environ, control.library.registry.read(), control.in_memory())
    services = control.services
    config = ModelRequest(ref, None, {}).config(services.settings.model)
    kv_disk = limit_bytes(services.paths, services.settings.cache)
    result = control.library.planner.fit(facts, config, kv_disk=kv_disk, probe=probe)
    return {**result.as_dict(), "words": {"verdict": verdict(result), **fit_rows(result)}}


MOST_HITS = 50


class PullRequest(Struct, forbid_unknown_fields=True):
    model: str
    anyway: bool = False
    """Download it even if it does not fit or cannot be served by this version."""


class DownloadRequest(Struct, forbid_unknown_fields=True):
    model: str


class RemoveRequest(Struct, forbid_unknown_fields=True):
    models: list[str]


@get("/downloads", sync_to_thread=False)
def downloads(request: StrictRequest) -> dict[str, Any]:
    return {"downloads": [download.as_dict() for download in _library(request).downloads.all()]}


@post("/downloads", status_code=202)
async def pull(request: StrictRequest, data: JSONBody[PullRequest]) -> dict[str, Any]:
    """Start or resume a download and answer at once; `GET /downloads` and the events report its progress."""
    found = _library(request).downloads.start(data.model, anyway=data.anyway)
    return {"download": found.as_dict()}


@post("/downloads/pause", status_code=200)
async def pause(request: StrictRequest, data: JSONBody[DownloadRequest]) -> dict[str, Any]:
    return {"download": _library(request).downloads.pause(data.model).as_dict()}


@post("/downloads/resume", status_code=200)
async def resume(request: StrictRequest, data: JSONBody[DownloadRequest]) -> dict[str, Any]:
    return {"download": _library(request).downloads.resume(data.model).as_dict()}


@post("/downloads/cancel", status_code=200)
async def cancel_download(request: StrictRequest, data: JSONBody[DownloadRequest]) -> dict[str, Any]:
    """Cancel a download and delete its files."""
    return {"download": (await _library(request).downloads.cancel(data.model)).as_dict()}


@post("/downloads/dismiss", status_code=200)
async def dismiss_download(request: StrictRequest, data: JSONBody[DownloadRequest]) -> dict[str, Any]:
    """Take an ended download from the list; files fetched by a failed one are deleted."""
    return {"download": (await _library(request).downloads.dismiss(data.model)).as_dict()}


@post("/models/delete", status_code=200)
async def delete_models(request: StrictRequest, data: JSONBody[RemoveRequest]) -> dict[str, Any]:
    """Delete models from the disk. A model that is loaded or being downloaded is refused."""
    return {"removed": [asdict(each) for each in await _library(request).remove(data.models)]}


@get("/search")
async def search(
    request: StrictRequest,
    text: FromQuery[str],
    limit: Annotated[int, QueryParameter(ge=1, le=MOST_HITS)] = 15,
) -> dict[str, Any]:
    """Search the hub for models, with whether each would fit here."""
    try:
        hits = await _library(request).search(text, limit)
    except HubError as error:
        raise ApiError(502, str(error), error.code) from error
    return {"models": [asdict(hit) for hit in hits]}


@get("/recommended")
async def recommended(request: StrictRequest) -> dict[str, Any]:
    """List recommended models by short name, with how each fits this machine. The hub is not asked."""
    return {"models": [each.as_dict() for each in await _library(request).recommend()]}


@post("/recommended/refresh", status_code=200)
async def refresh_recommended(request: StrictRequest) -> dict[str, Any]:
    """Ask the hub for sizes and licenses of the recommended models; the list is by them from then on."""
    try:
        count, failed = await _library(request).refresh_recommended()
    except HubError as error:
        raise ApiError(502, str(error), error.code) from error
    return {"refreshed": count, "failed": {repo: str(error) for repo, error in failed.items()}}


def _library(request: StrictRequest) -> Library:
    control: DaemonController = request.app.state.control
    return control.library
