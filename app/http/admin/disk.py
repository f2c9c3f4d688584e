"""Models on this disk, and whether a model would fit: what `llmbox ls` and `llmbox fit` tell."""

import asyncio
import os
from typing import Any

from litestar import Request, get
from litestar.datastructures import State
from litestar.params import FromQuery

from llmbox.engine.errors import DeviceError

from ...catalog import on_disk
from ...control.control import Control
from ...errors import ApiError, CliError, Exit


@get("/disk", name="admin_disk")
async def disk(request: Request[Any, Any, State]) -> dict[str, Any]:
    control: Control = request.app.state.control
    return {"models": await asyncio.to_thread(_on_disk, control)}


@get("/fit", name="admin_fit")
async def fit(
    request: Request[Any, Any, State], model: FromQuery[str], probe: FromQuery[bool] = False
) -> dict[str, Any]:
    """With the daemon's settings. Of a model on the hub only its config and headers are read.

    `words` has the same by name, for people; `probe` measures the memory's bandwidth anew.
    """
    control: Control = request.app.state.control
    try:
        return await asyncio.to_thread(_fit, control, model, probe=probe)
    except DeviceError as error:
        raise ApiError(400, f"{error}.", error.code) from error
    except CliError as error:
        status = 404 if error.exit == Exit.NOT_FOUND else 400
        raise ApiError(status, f"{error.what}: {error.why}", "cannot_tell", "model") from error


def _on_disk(control: Control) -> list[dict[str, Any]]:
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


def _fit(control: Control, model: str, *, probe: bool) -> dict[str, Any]:
    from llmbox.engine.machine import read_machine  # noqa: PLC0415

    from ...control.facts import find_facts  # noqa: PLC0415 - imports what only this needs
    from ...control.model_request import ModelRequest  # noqa: PLC0415
    from ...engines.budget import usable_device  # noqa: PLC0415
    from ...hub.bandwidth import device_bandwidth  # noqa: PLC0415
    from ...hub.fit import fit as check  # noqa: PLC0415
    from ...hub.fit_text import fit_rows, verdict  # noqa: PLC0415

    facts, ref = find_facts(model, os.environ, control.library.registry.read(), control.in_memory())
    settings = control.services.settings
    config = ModelRequest(ref, None, {}).config(settings.model)
    machine = read_machine()
    device = usable_device(machine, config.device)
    result = check(
        facts,
        machine,
        config,
        budget_gb=settings.memory.budget,
        disk=control.services.paths.state_dir,
        bandwidth=device_bandwidth(
            machine, device, control.services.paths.bandwidth_file, config.threads, refresh=probe
        ),
    )
    words = {"verdict": verdict(result), **fit_rows(result)}
    return {**result.as_dict(), "words": words}
