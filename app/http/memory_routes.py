"""Models into memory and out of it, for programs. What people use (pins, progress) is under /admin/api."""

import asyncio
from typing import Annotated

from litestar import Response, Router, post
from litestar.params import Body
from msgspec import Struct

from ..control.control import Control, Failure
from ..errors import ApiError
from ..gateway.gateway import context_limit
from .admin.models import begin_load
from .admin.schema import LoadRequest, Unloaded
from .credentials import identity_of
from .disconnect import while_connected
from .errors import error_type
from .guard import Access
from .openai.context import HttpRequest
from .openai.fields import Name
from .openai.responses import Model


class UnloadOneRequest(Struct, forbid_unknown_fields=True):
    model: Name


@post("/v1/load", status_code=200, name="load", operation_id="loadModel")
async def load(request: HttpRequest, data: Annotated[LoadRequest, Body()]) -> Response[Model]:
    """Loads a model that is on disk, and answers once it is ready. It goes on when the client leaves."""
    control: Control = request.app.state.control
    identity_of(request).require_model(data.model)
    wanted, loading = await begin_load(control, data)
    failure = await while_connected(request.receive, _outcome(loading))
    if failure is not None:
        cause = failure.cause.replace(f"{wanted.ref.path}/", "")  # no paths to clients
        kind, headers = error_type(failure.status), dict(failure.headers)
        raise ApiError(failure.status, cause, failure.code, "model", kind, headers)
    model = control.services.engines.find(wanted.served_name)
    if model is None or model.supervisor.info is None:
        raise _gone()
    limit = context_limit(model.supervisor.info)
    told = Model(id=model.name, created=int(model.loaded_at), context_window=limit, max_model_len=limit)
    return Response(told)


@post("/v1/unload", status_code=200, name="unload", operation_id="unloadModel")
async def unload(request: HttpRequest, data: Annotated[UnloadOneRequest, Body()]) -> Unloaded:
    """Takes a model out of memory; requests that it is answering end with an error."""
    control: Control = request.app.state.control
    identity_of(request).require_model(data.model)
    return Unloaded(await control.unload(data.model))


async def _outcome(loading: "asyncio.Task[Failure | None]") -> Failure | None:
    await asyncio.wait({loading})  # whoever waits may leave: the load stays
    if loading.cancelled():
        raise _gone()
    return loading.result()


def _gone() -> ApiError:
    return ApiError(409, "The model was unloaded while it was being loaded.", "model_unloaded", "model")


memory_router = Router(path="/", route_handlers=[load, unload], opt={"access": Access.ADMIN}, tags=["Memory"])
