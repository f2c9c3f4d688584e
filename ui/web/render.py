"""Template rendering, with all data escaped; form fields; static files: an allow-list that is read and
compressed once and revalidated by ETag.
"""

import gzip
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litestar import MediaType, Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath

from llmbox import __version__
from llmbox.app.control.controller import DaemonController
from llmbox.app.errors import ApiError
from llmbox.app.http.auth.guard import Access, csrf_token
from llmbox.app.http.server.errors import answer, to_api_error
from llmbox.app.services import Services
from llmbox.app.telemetry.snapshot import NA, Number
from llmbox.app.util import formatting

if TYPE_CHECKING:
    from jinja2 import Environment


NONE = "\N{EN DASH}"


def known(number: Number | None) -> float | None:
    """Return the number as a float; None if it is not available."""
    return None if number is None or number is NA else float(number)


def size(number: Number | None) -> str:
    value = known(number)
    return NONE if value is None else formatting.size(value)


def span(number: Number | None) -> str:
    value = known(number)
    return NONE if value is None else formatting.span(value)


def percent(number: Number | None) -> str:
    """Format a share in percent. A small share is not called 0."""
    value = known(number)
    if value is None:
        return NONE
    return "under 1 %" if 0 < value < 0.01 else f"{100 * value:.0f} %"


def rate(number: Number | None) -> str:
    """Format a rate a second, with one decimal while it is small."""
    value = known(number)
    return NONE if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def rate_range(rates: tuple[float, float]) -> str:
    return formatting.rate_range(*rates)


def count(number: Number | None) -> str:
    value = known(number)
    return NONE if value is None else f"{value:,.0f}"


def money(amount: float) -> str:
    """Format an amount: cents, and more digits where it is less than one."""
    if 0 < amount < 1e-4:
        return "under 0.0001"
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.2g}"


def value(anything: Any) -> str:
    """Format the value of a setting."""
    if anything is None:
        return "auto"
    if isinstance(anything, bool):
        return "true" if anything else "false"
    if isinstance(anything, tuple | list):
        return ", ".join(map(str, anything))
    return f"{anything:g}" if isinstance(anything, float) and abs(anything) < 1e6 else str(anything)


def clock(unix: float) -> str:
    """Format a time, with the date only if it is not of today."""
    then = datetime.fromtimestamp(unix).astimezone()
    today = datetime.now().astimezone().date()
    return then.strftime("%H:%M:%S" if then.date() == today else "%Y-%m-%d %H:%M")


def ago(unix: float | None) -> str:
    if unix is None:
        return "never"
    return f"{formatting.whole_span(max(1.0, time.time() - unix))} ago"


PanelRequest = Request[Any, Any, State]

PAGES = (
    ("overview", "/admin", "Overview", "o"),
    ("models", "/admin/models", "Models", "m"),
    ("chat", "/admin/chat", "Chat", "c"),
    ("playground", "/admin/playground", "Playground", "p"),
    ("requests", "/admin/requests", "Requests", "r"),
    ("telemetry", "/admin/telemetry", "Telemetry", "t"),
    ("memory", "/admin/memory", "Memory", "e"),
    ("keys", "/admin/keys", "Keys", "k"),
    ("settings", "/admin/settings", "Settings", "s"),
    ("system", "/admin/system", "System", "y"),
)
"""Pages of the menu: name (also of its icon), address, label, and the key that goes there after `g`."""
THEME_COOKIE = "llmbox_theme"


@dataclass(frozen=True, slots=True)
class PageContext:
    """Context of a page: the daemon and the reader's CSRF token."""

    control: DaemonController
    csrf: str

    @property
    def services(self) -> Services:
        return self.control.services


def panel_of(request: PanelRequest) -> PageContext:
    """Return the page context of a request."""
    return PageContext(request.app.state.control, csrf_token(request))


def page(
    request: PanelRequest, template: str, section: str, status: int = 200, **values: Any
) -> Response[str]:
    """Render a page. `section` is the highlighted entry of `PAGES`."""
    panel = panel_of(request)
    html = render(
        template,
        panel,
        section=section,
        pages=PAGES,
        libraries=has_libraries(),
        theme=theme if (theme := request.cookies.get(THEME_COOKIE)) in {"light", "dark"} else "",
        version=__version__,
        **values,
    )
    return Response(html, status_code=status, media_type=MediaType.HTML)


def render(template: str, panel: PageContext, **values: Any) -> str:
    """Render a template or fragment to HTML."""
    return environment().get_template(template).render(csrf=panel.csrf, **values)


@cache
def environment() -> "Environment":
    """Create the Jinja environment, at the first page: the daemon's start does not wait for it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters: dict[str, Callable[..., Any]] = {
        "ago": ago,
        "clock": clock,
        "count": count,
        "money": money,
        "percent": percent,
        "rate": rate,
        "rate_range": rate_range,
        "size": size,
        "span": span,
        "value": value,
    }
    made.filters.update(filters)
    return made


def is_fragment(request: Request[Any, Any, State]) -> bool:
    """Return whether htmx sent the request: it inserts the response into the open page."""
    return "hx-request" in request.headers


def done(request: PanelRequest, back: str, said: str) -> Response[str]:
    """Respond after a change. `back` is the page that a browser without scripts is sent to."""
    if is_fragment(request):
        html = render("live/said.html", panel_of(request), said=said, failed=False)
        return Response(html, media_type=MediaType.HTML)
    return Response("", status_code=303, headers={"Location": back}, media_type=MediaType.HTML)


def show_error(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Respond to an error with a page or a fragment. Errors of the auth guard redirect to the sign-in."""
    plain = answer(request, error)  # also logs server errors
    api_error = to_api_error(error)
    if api_error.status in {303, 401} or "identity" not in request.scope["state"]:
        return plain
    headers = dict(api_error.headers)
    if is_fragment(request):
        html = render("live/said.html", panel_of(request), said=api_error.message, failed=True)
        headers |= {"HX-Retarget": "#said", "HX-Reswap": "innerHTML"}
        return Response(html, status_code=api_error.status, headers=headers, media_type=MediaType.HTML)
    shown = page(request, "error.html", "", api_error.status, error=api_error)
    shown.headers.update(headers)
    return shown


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
