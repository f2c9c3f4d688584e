"""Static files of the panel: an allow-list read and compressed once, revalidated by ETag."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath

from llmbox.app.errors import ApiError
from llmbox.app.http.auth.guard import Access

FOLDER = Path(__file__).parent / "static"
LIBRARIES = ("vendor/htmx.min.js", "vendor/sse.min.js", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    media_type: str
    body: bytes
    packed: bytes
    etag: str


@cache
def files() -> dict[str, StaticFile]:
    found = [path for path in FOLDER.rglob("*") if path.suffix in _TYPES and path.is_file()]
    return {path.relative_to(FOLDER).as_posix(): _read(path) for path in found}


def has_libraries() -> bool:
    """Return False if the build could not fetch the libraries: pages then do not update by themselves."""
    return all(name in files() for name in LIBRARIES)


@get(
    "/admin/static/{name:path}",
    sync_to_thread=False,
    opt={"access": Access.SIGN_IN},
    name="panel_file",
    include_in_schema=False,
)
def static_file(request: Request[Any, Any, State], name: FromPath[str]) -> Response[bytes]:
    found = files().get(name.lstrip("/"))
    if found is None:
        raise ApiError(404, "The panel has no such file.", "not_found")
    headers = {"ETag": found.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == found.etag:
        return Response(b"", status_code=304, headers=headers, media_type=found.media_type)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            found.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=found.media_type
        )
    return Response(found.body, headers=headers, media_type=found.media_type)


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:16]
    return StaticFile(_TYPES[path.suffix], body, gzip.compress(body, 9, mtime=0), f'"{digest}"')
