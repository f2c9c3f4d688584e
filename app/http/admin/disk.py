"""Models on this disk, and whether a model would fit: what `llmbox ls` and `llmbox fit` tell."""

import asyncio
from typing import Any

from litestar import Request, get
from litestar.datastructures import State
from litestar.params import FromQuery

from ...catalog import on_disk
from ...errors import ApiError, CliError, Exit
from ...paths import Paths
from ...services import Services


@get("/disk", name="admin_disk")
async def disk(request: Request[Any, Any, State]) -> dict[str, Any]:
    services: Services = request.app.state.services
    return {"models": await asyncio.to_thread(_on_disk, services.paths)}


@get("/fit", name="admin_fit")
async def fit(request: Request[Any, Any, State], model: FromQuery[str]) -> dict[str, Any]:
    """With the daemon's settings. Of a model on the hub only its config and headers are read."""
    services: Services = request.app.state.services
    try:
        return await asyncio.to_thread(_fit, services.paths, model)
    except CliError as error:
        status = 404 if error.exit == Exit.NOT_FOUND else 400
        raise ApiError(status, f"{error.what}: {error.why}", "cannot_tell", "model") from error


def _on_disk(paths: Paths) -> list[dict[str, Any]]:
    program = _program(paths)
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
        for model in on_disk(program.environ, program.names)
    ]


def _fit(paths: Paths, model: str) -> dict[str, Any]:
    from llmbox.engine.machine import read_machine  # noqa: PLC0415

    from ...cli.fit import find_facts  # noqa: PLC0415 - imports what only this needs
    from ...daemon.model_request import ModelRequest  # noqa: PLC0415
    from ...engines.budget import device_of  # noqa: PLC0415
    from ...hub.fit import device_bandwidth  # noqa: PLC0415
    from ...hub.fit import fit as check  # noqa: PLC0415

    program = _program(paths)
    facts, ref = find_facts(program, model)
    settings = program.settings().settings
    config = ModelRequest(ref, None, {}).config(settings.model)
    machine = read_machine()
    result = check(
        facts,
        machine,
        config,
        budget_gb=settings.memory.budget,
        disk=paths.state_dir,
        bandwidth=device_bandwidth(machine, device_of(machine, config.device), config.threads),
    )
    return result.as_dict()


def _program(paths: Paths) -> Any:
    from ...cli.program import Program  # noqa: PLC0415

    program = Program()
    program.paths = paths
    return program
