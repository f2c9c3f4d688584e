"""From a template and values to an answer. Everything that comes from data is escaped."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litestar import MediaType, Request, Response
from litestar.datastructures import State

from llmbox import __version__
from llmbox.app.control.control import Control
from llmbox.app.http.credentials import csrf_token
from llmbox.app.services import Services

from . import show
from .static_files import has_libraries

if TYPE_CHECKING:
    from jinja2 import Environment

PanelRequest = Request[Any, Any, State]

PAGES = (
    ("overview", "/admin", "Overview"),
    ("models", "/admin/models", "Models"),
    ("requests", "/admin/requests", "Requests"),
    ("playground", "/admin/playground", "Playground"),
    ("telemetry", "/admin/telemetry", "Telemetry"),
    ("memory", "/admin/memory", "Memory"),
    ("keys", "/admin/keys", "Keys"),
    ("settings", "/admin/settings", "Settings"),
    ("system", "/admin/system", "System"),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """What every page needs of the daemon and of its reader."""

    control: Control
    csrf: str

    @property
    def services(self) -> Services:
        return self.control.services


def panel_of(request: PanelRequest) -> Panel:
    return Panel(request.app.state.control, csrf_token(request))


def page(
    request: PanelRequest, template: str, section: str, status: int = 200, **values: Any
) -> Response[str]:
    """`section` is the entry of `PAGES` that is lit."""
    panel = panel_of(request)
    html = render(
        template,
        panel,
        section=section,
        pages=PAGES,
        libraries=has_libraries(),
        version=__version__,
        **values,
    )
    return Response(html, status_code=status, media_type=MediaType.HTML)


def render(template: str, panel: Panel, **values: Any) -> str:
    return environment().get_template(template).render(csrf=panel.csrf, **values)


@cache
def environment() -> "Environment":
    """Made by the first page: the daemon's start does not wait for it."""
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
        "ago": show.ago,
        "clock": show.clock,
        "count": show.count,
        "percent": show.percent,
        "rate": show.rate,
        "size": show.size,
        "span": show.span,
        "value": show.value,
    }
    made.filters.update(filters)
    return made
