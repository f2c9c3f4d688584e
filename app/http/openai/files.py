"""OpenAI's Files API for batches: uploaded input files, and output files of batches."""

import re
import time
from collections import OrderedDict
from typing import Annotated, Any, Literal

from litestar import Response, Router, delete, get, post
from litestar.datastructures import UploadFile
from litestar.exceptions import HTTPException
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream
from msgspec import Struct

from ...errors import ApiError, missing_parameter
from ...services import Services
from ...store.batches import Batch, BatchPage
from ...store.files import StoredFile
from ..auth.guard import Access, services_and_owner
from ..server.request import StrictRequest
from .batches import OutputKind, find_output, has_output, output_id, output_lines, output_size
from .sampling import invalid
from .stored import DeletedObject, Order

_PATH = "/v1/files"
_ONE = _PATH + "/{file_id:str}"
_LEAST_S, _MOST_S = 3600, 2_592_000
_SIZES: OrderedDict[str, int] = OrderedDict()
"""Size in bytes of each output file of a batch, by file id. It never changes once the file exists."""
_MOST_SIZES = 1000


class FileObject(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@post(_PATH, status_code=200, opt={"access": Access.INFER}, operation_id="createFile")
async def create_file(request: StrictRequest) -> FileObject:
    """Keep a file: `multipart/form-data` with `file` and `purpose`, which is `batch`."""
    services, owner = services_and_owner(request)
    form = await _form(request)
    purpose, upload = form.get("purpose"), form.get("file")
    if purpose is None:
        raise missing_parameter("purpose")
    if purpose != "batch":
        raise invalid("purpose", "only files for batches are supported: 'batch'")
    if not isinstance(upload, UploadFile):
        raise missing_parameter("file")
    expires = _expires(form)
    name = upload.filename.rpartition("/")[2][:512] or "file"
    file = await services.files.add(upload.file, owner, name, "batch", expires)
    return _to_file_object(file)


async def _form(request: StrictRequest) -> dict[str, Any]:
    if request.content_type[0] != "multipart/form-data":
        raise ApiError(415, "Files are sent as multipart/form-data.", "unsupported_media_type")
    try:
        form = await request.form()
    except (HTTPException, ValueError, LookupError) as error:
        raise ApiError(400, "The multipart form cannot be read.", "invalid_form") from error
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name in fields:
            raise ApiError(400, f"The form holds the field {name[:64]!r} twice.", "invalid_form", name[:64])
        fields[name] = value
    return fields


def _expires(form: dict[str, Any]) -> float | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after.anchor", "it must be 'created_at'")
    number = int(seconds) if isinstance(seconds, str) and re.fullmatch("[0-9]{1,9}", seconds) else 0
    if not _LEAST_S <= number <= _MOST_S:
        raise invalid("expires_after.seconds", f"it is a number from {_LEAST_S} to {_MOST_S}")
    return time.time() + number


@get(_PATH, opt={"access": Access.STORED}, operation_id="listFiles")
async def list_files(
    request: StrictRequest,
    purpose: Annotated[str | None, QueryParameter(max_length=64)] = None,
    after: Annotated[str | None, QueryParameter(max_length=128)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=10_000)] = 10_000,
    order: Order = "desc",
) -> FileList:
    """The caller's files, output and error files of ended batches included."""
    services, owner = services_and_owner(request)
    found = (
        [_to_file_object(file) for file in await services.files.all(owner)]
        if purpose in {None, "batch"}
        else []
    )
    if purpose in {None, "batch_output"}:
        found += await _outputs(services, owner)
    found.sort(key=lambda file: (file.created_at, file.id), reverse=order == "desc")
    if after is not None:
        place = next((n for n, file in enumerate(found) if file.id == after), None)
        if place is None:
            raise _not_found(after, "after")
        found = found[place + 1 :]
    data = found[:limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return FileList(data=data, first_id=first, last_id=last, has_more=len(found) > limit)


@get(_ONE, opt={"access": Access.STORED}, operation_id="retrieveFile")
async def retrieve_file(request: StrictRequest, file_id: FromPath[str]) -> FileObject:
    """Return the description of one file."""
    services, owner = services_and_owner(request)
    if (output := await find_output(services, owner, file_id)) is not None:
        return await _describe_output(services, *output)
    return _to_file_object(await _find(services, owner, file_id))


@get(_ONE + "/content", opt={"access": Access.STORED}, operation_id="downloadFile")
async def file_content(request: StrictRequest, file_id: FromPath[str]) -> Response[Any]:
    """Return the file itself."""
    services, owner = services_and_owner(request)
    if (output := await find_output(services, owner, file_id)) is not None:
        return Stream(output_lines(services, *output), media_type="application/octet-stream")
    file = await _find(services, owner, file_id)
    return Stream(services.files.chunks(file), media_type="application/octet-stream")


@delete(_ONE, status_code=200, opt={"access": Access.STORED}, operation_id="deleteFile")
async def delete_file(request: StrictRequest, file_id: FromPath[str]) -> DeletedObject:
    """Erase a file. With a batch's output or error file the whole batch goes: its requests and answers."""
    services, owner = services_and_owner(request)
    if (output := await find_output(services, owner, file_id)) is not None:
        await services.batches.delete(output[0])
    elif not await services.files.delete(owner, file_id):
        raise _not_found(file_id, "file_id")
    return DeletedObject(id=file_id, object="file")


async def _find(services: Services, owner: str, file_id: str) -> StoredFile:
    found = await services.files.get(owner, file_id)
    if found is None:
        raise _not_found(file_id, "file_id")
    return found


async def _outputs(services: Services, owner: str) -> list[FileObject]:
    kinds: tuple[OutputKind, ...] = ("output", "error")
    found: list[FileObject] = []
    after = ""
    while True:
        page = BatchPage(kind="openai", owner=owner, after=after, limit=100)
        batches = await services.batches.store.find(page) or []
        found += [
            await _describe_output(services, batch, kind)
            for batch in batches[: page.limit]
            for kind in kinds
            if has_output(batch, kind)
        ]
        if len(batches) <= page.limit:
            return found
        after = batches[page.limit - 1].id


async def _describe_output(services: Services, batch: Batch, kind: OutputKind) -> FileObject:
    id_ = output_id(batch, kind)
    if id_ not in _SIZES:
        _SIZES[id_] = await output_size(services, batch, kind)
        if len(_SIZES) > _MOST_SIZES:
            _SIZES.popitem(last=False)
    return FileObject(
        id=id_,
        bytes=_SIZES[id_],
        created_at=int(batch.ended or batch.created),
        filename=f"{batch.id}_{kind}.jsonl",
        purpose="batch_output",
    )


def _to_file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.size,
        created_at=int(file.created),
        expires_at=None if file.expires is None else int(file.expires),
        filename=file.filename,
        purpose="batch",
    )


def _not_found(file_id: str, param: str) -> ApiError:
    return ApiError(404, f"There is no file {file_id!r} of yours.", "file_not_found", param)


files_router = Router(
    path="/",
    route_handlers=[create_file, list_files, retrieve_file, file_content, delete_file],
    tags=["OpenAI"],
)
