"""Settings page: every setting with its origin. A change is reviewed as a diff, then written to the TOML
file.
"""

import asyncio
from dataclasses import dataclass

from litestar import Response, get, post

from llmbox.app.config.loader import SettingOrigin, check_value, set_value
from llmbox.app.config.schema import SettingSpec, schema
from llmbox.app.config.settings import Scalar
from llmbox.app.control.controller import DaemonController
from llmbox.app.errors import ApiError, CliError
from llmbox.app.http.server.request import form_of
from llmbox.app.http.server.sockets import is_loopback

from .. import render as show
from ..render import PanelRequest, done, page, panel_of

BACK = "/admin/settings"
LOCKED = {"env": "set in the environment", "flag": "set on the command line"}
ORIGINS = {"default": "built in", "user": "your file", "system": "the system's file", **LOCKED}


@dataclass(frozen=True, slots=True)
class SettingsRow:
    key: SettingSpec
    text: str
    default: str
    origin: SettingOrigin
    waits: bool
    """True if the value in the file takes effect at the next start."""

    @property
    def locked(self) -> str:
        return LOCKED.get(self.origin.source, "")

    @property
    def origin_text(self) -> str:
        return ORIGINS[self.origin.source]


@dataclass(frozen=True, slots=True)
class Change:
    key: SettingSpec
    before: str
    after: str
    value: Scalar


@get("/settings", sync_to_thread=False, name="panel_settings")
def settings_page(request: PanelRequest) -> Response[str]:
    return _page(request)


@post("/settings", status_code=200, name="panel_settings_review")
async def review_settings(request: PanelRequest) -> Response[str]:
    """Review the changes; nothing is written."""
    form = await form_of(request)
    try:
        changes = _changes(panel_of(request).control, form)
    except CliError as error:
        return _page(request, 400, problem=f"{error.why}.", form=form)
    if not changes:
        return _page(request, problem="Nothing was changed.")
    return page(request, "settings/settings_review.html", "settings", changes=changes)


@post("/settings/save", status_code=200, name="panel_settings_save")
async def save_settings(request: PanelRequest) -> Response[str]:
    control = panel_of(request).control
    path = control.services.paths.config_file
    try:
        changes = _changes(control, await form_of(request))
        for change in changes:
            await asyncio.to_thread(set_value, path, change.key, change.value)
    except CliError as error:
        raise ApiError(400, f"{error.what}: {error.why}", "invalid_value") from error
    control.reload()
    return done(request, BACK, "Saved.")


def _page(
    request: PanelRequest, status: int = 200, *, problem: str = "", form: dict[str, str] | None = None
) -> Response[str]:
    control = panel_of(request).control
    waiting = set(control.pending_restart())
    sections: dict[str, list[SettingsRow]] = {}
    for key, value, origin in control.loaded.table():
        given = (form or {}).get(key.name)
        text = show.value(value) if given is None else given
        row = SettingsRow(key, text, show.value(key.default), origin, key.name in waiting)
        sections.setdefault(key.section, []).append(row)
    return page(
        request,
        "settings/settings.html",
        "settings",
        status,
        sections=sections,
        waiting=sorted(waiting),
        problem=problem,
        reach=_describe_reach(control),
        file=control.services.paths.config_file,
    )


def _changes(control: DaemonController, form: dict[str, str]) -> list[Change]:
    """Return the changes in a form. Locked settings are never changed. Raises CliError for an invalid
    value.
    """
    table = {key.name: (value, origin) for key, value, origin in control.loaded.table()}
    found = []
    for name, text in form.items():
        key = schema().get(name)
        if key is None or table[name][1].source in LOCKED:
            continue
        before = table[name][0]
        if text.strip() == show.value(before):
            continue
        value = check_value(key, text.strip(), name, from_text=True)
        if value != before:
            found.append(Change(key, show.value(before), show.value(value), value))
    return found


def _describe_reach(control: DaemonController) -> list[str]:
    """Describe in sentences who can reach the daemon, from the sockets inwards."""
    settings, running = control.services.settings.server, control.running
    keys = [key for key in control.services.security.keys.list() if not key.is_expired()]
    admins = sum("admin" in key.scopes for key in keys)
    if is_loopback(running.host):
        rest = "and each needs an API key" if settings.require_key else "without a key"
        who = f"Programs on this machine reach the API at {running.url}, {rest}. Other machines do not."
    else:
        who = f"Every machine that reaches {running.host} reaches the API; each request needs an API key."
    names = ", ".join(settings.allowed_hosts)
    hosts = f"Beside the names of this machine, requests may be addressed to {names}." if names else ""
    valid = "1 key is valid" if len(keys) == 1 else f"{len(keys)} keys are valid"
    count = f"{valid}; {admins or 'none'} of them may administer this box."
    panel = "This panel and the admin API take a one-time link from llmbox up, or an admin key."
    local = f"The command line uses {running.socket}, which only your user on this machine can open."
    return [who, *([hosts] if hosts else []), count, panel, local]
