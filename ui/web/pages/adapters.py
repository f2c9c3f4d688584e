"""Adapters page: LoRA adapters of the box, where they are in use, add and remove."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from litestar import Response, get, post

from llmbox.app.control.controller import DaemonController
from llmbox.app.errors import ApiError, CliError, Exit
from llmbox.app.http.server.request import form_of
from llmbox.app.hub.adapter_download import AdapterFetch, download_adapter
from llmbox.app.hub.errors import DownloadStopped
from llmbox.app.models.adapters import (
    AddedAdapter,
    add_adapter,
    is_from_hub,
    list_adapters,
    remove_adapter,
    require_base,
)
from llmbox.app.models.catalog import on_disk
from llmbox.app.util.threads import in_thread

from ..render import PageContext, PanelRequest, done, page, panel_of, render

BACK = "/admin/models/adapters"
_STATUS = {Exit.NOT_FOUND: 404, Exit.CONFLICT: 409, Exit.NETWORK: 502}


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """One adapter of the list."""

    adapter: AddedAdapter
    in_memory: bool
    """True if its base's engine has it in a slot."""
    base_loaded: bool
    base_here: bool
    """True if its base is in memory or on disk."""
    idle: float | None
    """Seconds since a request named it; None: not since the daemon started."""


@get("/models/adapters", name="panel_adapters")
async def adapters_page(request: PanelRequest) -> Response[str]:
    panel = panel_of(request)
    names = panel.control.library.registry.read_or_nothing()
    disk = await asyncio.to_thread(on_disk, os.environ, names)
    bases = sorted({model.ref.name for model in disk if model.servable} | panel.control.in_memory().keys())
    return page(
        request,
        "models/adapters.html",
        "models",
        rows=await _rows(panel),
        fetches=_fetches(panel),
        bases=bases,
    )


async def adapters_pieces(panel: PageContext) -> dict[str, str]:
    rows, fetches = await _rows(panel), _fetches(panel)
    return {"adapters": render("live/models/adapters.html", panel, rows=rows, fetches=fetches)}


def _fetches(panel: PageContext) -> list[AdapterFetch]:
    return list(panel.control.library.adapter_fetches.values())


@post("/models/adapters/add", status_code=200, name="panel_adapter_add")
async def add(request: PanelRequest) -> Response[str]:
    form = await form_of(request)
    name, source, base = (form.get(key, "").strip() for key in ("name", "source", "base"))
    control = panel_of(request).control
    fetches, fetch = control.library.adapter_fetches, None
    if is_from_hub(source):
        if name in fetches:
            raise ApiError(409, f"{name} is being downloaded from the hub.", "name_in_use")
        fetch = fetches[name] = AdapterFetch(name, source)
    try:
        found = await in_thread(lambda: _add(control, name, source, base or None, fetch), "llmbox-adapter")
    except DownloadStopped:
        kept = "What was downloaded stays in the hub's cache, and the next try resumes from there."
        return done(request, BACK, f"{name} was not added: its download was cancelled. {kept}")
    except CliError as error:
        fix = f". {error.fix}" if error.fix else ""
        raise ApiError(
            _STATUS.get(error.exit, 400), f"{error.what}: {error.why}{fix}", "bad_adapter"
        ) from error
    return done(request, BACK, f"{found.name} is {found.base} with an adapter of rank {found.rank}.")


@post("/models/adapters/cancel", status_code=200, name="panel_adapter_cancel")
async def cancel(request: PanelRequest) -> Response[str]:
    name = (await form_of(request)).get("name", "")
    fetch = panel_of(request).control.library.adapter_fetches.get(name)
    if fetch is None or fetch.is_here:
        raise ApiError(404, f"{name} is not being downloaded from the hub.", "adapter_not_found")
    fetch.stop.set()
    return done(request, BACK, f"The download of {name} is being cancelled.")


@post("/models/adapters/remove", status_code=200, name="panel_adapter_remove")
async def remove(request: PanelRequest) -> Response[str]:
    name = (await form_of(request)).get("name", "")
    try:
        await asyncio.to_thread(remove_adapter, panel_of(request).control.library.registry, name)
    except CliError as error:
        raise ApiError(404, f"{error.what}: {error.why}.", "adapter_not_found") from error
    return done(request, BACK, f"{name} is no longer an adapter.")


def _add(
    control: DaemonController, name: str, source: str, base: str | None, fetch: AdapterFetch | None
) -> AddedAdapter:
    """Add an adapter from a folder or from the hub (`fetch`). Raises CliError and DownloadStopped."""
    registry, memory = control.library.registry, control.in_memory()

    def check(config: Mapping[str, object]) -> None:
        require_base(registry, os.environ, name, config, base, memory)

    if fetch is not None:
        try:
            folder = download_adapter(
                source,
                os.environ,
                stop=fetch.stop,
                report=fetch.report,
                note=fetch.note,
                check=check,
                rate=control.library.bandwidth,
            )
            fetch.is_here = True
            return add_adapter(registry, os.environ, name, folder, base, memory)
        finally:  # also where the page that asked for it was closed
            del control.library.adapter_fetches[name]
    if not source.startswith(("/", "~")):
        raise CliError(
            f"{source[:200]!r} is not an adapter",
            "it is neither a name of the hub, such as org/name, nor the absolute path of a folder",
            "",
            Exit.USAGE,
        )
    return add_adapter(registry, os.environ, name, Path(source), base, memory)


async def _rows(panel: PageContext) -> list[AdapterRow]:
    control, registry = panel.control, panel.control.library.registry
    names = registry.read_or_nothing()
    found = await asyncio.to_thread(list_adapters, registry, names)
    rows, now = [], time.time()
    for each in found:
        alias = names.aliases.get(each.name)
        model = control.services.engines.find(control.residency.real_name(each.name))
        resident = (
            model is not None and alias is not None and alias.adapter in model.supervisor.stats.adapters
        )
        used = control.residency.adapters_used.get(each.name)
        here = await control.residency.is_available(each.name)
        idle = None if used is None else now - used
        rows.append(AdapterRow(each, resident, model is not None, here, idle))
    return rows
