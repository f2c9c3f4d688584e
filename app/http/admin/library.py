"""Models on disk and on the hub: downloads, search, deletion."""

from dataclasses import asdict
from typing import Annotated, Any

from litestar import Request, get, post
from litestar.datastructures import State
from litestar.params import FromQuery, JSONBody, QueryParameter
from msgspec import Struct

from ...control.control import Control
from ...control.library import Library
from ...errors import ApiError
from ...hub.errors import HubError

MOST_HITS = 50


class PullRequest(Struct, forbid_unknown_fields=True):
    model: str
    anyway: bool = False
    """Although it does not fit, or cannot be served by this version."""


class DownloadRequest(Struct, forbid_unknown_fields=True):
    model: str


class RemoveRequest(Struct, forbid_unknown_fields=True):
    models: list[str]


@get("/downloads", sync_to_thread=False, name="admin_downloads")
def downloads(request: Request[Any, Any, State]) -> dict[str, Any]:
    return {"downloads": [download.as_dict() for download in _library(request).downloads.all()]}


@post("/downloads", status_code=202, name="admin_pull")
async def pull(request: Request[Any, Any, State], data: JSONBody[PullRequest]) -> dict[str, Any]:
    """Begins, or goes on, and answers at once; `GET /downloads` and the events tell how it goes."""
    found = _library(request).downloads.start(data.model, anyway=data.anyway)
    return {"download": found.as_dict()}


@post("/downloads/pause", status_code=200, name="admin_pause")
async def pause(request: Request[Any, Any, State], data: JSONBody[DownloadRequest]) -> dict[str, Any]:
    return {"download": _library(request).downloads.pause(data.model).as_dict()}


@post("/downloads/resume", status_code=200, name="admin_resume")
async def resume(request: Request[Any, Any, State], data: JSONBody[DownloadRequest]) -> dict[str, Any]:
    return {"download": _library(request).downloads.resume(data.model).as_dict()}


@post("/downloads/cancel", status_code=200, name="admin_cancel_download")
async def cancel_download(
    request: Request[Any, Any, State], data: JSONBody[DownloadRequest]
) -> dict[str, Any]:
    """Deletes what was fetched."""
    return {"download": (await _library(request).downloads.cancel(data.model)).as_dict()}


@post("/downloads/dismiss", status_code=200, name="admin_dismiss_download")
async def dismiss_download(
    request: Request[Any, Any, State], data: JSONBody[DownloadRequest]
) -> dict[str, Any]:
    """Takes one that has ended from the list; what a failed one fetched is deleted."""
    return {"download": (await _library(request).downloads.dismiss(data.model)).as_dict()}


@post("/models/delete", status_code=200, name="admin_delete_models")
async def delete_models(request: Request[Any, Any, State], data: JSONBody[RemoveRequest]) -> dict[str, Any]:
    """From the disk. Not what is loaded or being downloaded."""
    return {"removed": [asdict(each) for each in await _library(request).remove(data.models)]}


@get("/search", name="admin_search")
async def search(
    request: Request[Any, Any, State],
    text: FromQuery[str],
    limit: Annotated[int, QueryParameter(ge=1, le=MOST_HITS)] = 15,
) -> dict[str, Any]:
    """Models of the hub, with whether they would fit here."""
    try:
        hits = await _library(request).search(text, limit)
    except HubError as error:
        raise ApiError(502, str(error), error.code) from error
    return {"models": [asdict(hit) for hit in hits]}


def _library(request: Request[Any, Any, State]) -> Library:
    control: Control = request.app.state.control
    return control.library
