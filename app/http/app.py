"""The application: routes inside, one shell around all of them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from litestar import Litestar, Response, get
from litestar.datastructures import State
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.types import ControllerRouterHandler, Receive, Scope, Send

from ..services import Services
from .common_routes import common_routes
from .cors import Cors
from .errors import answer
from .guard import Access, default_deny
from .openapi import document
from .origin import HostList
from .request import StrictRequest
from .shell import Shell
from .sign_in import sign_in_routes
from .sockets import is_loopback


class App(Litestar):
    """Litestar inside the shell, so that the shell's checks also hold where no route matches."""

    def __init__(self, services: Services, handlers: Sequence[ControllerRouterHandler]) -> None:
        limits = services.settings.limits
        super().__init__(
            handlers,
            guards=[default_deny],
            request_class=StrictRequest,
            exception_handlers={Exception: answer},
            state=State(
                {
                    "services": services,
                    "json_depth": limits.json_depth,
                    "stream_buffer_bytes": limits.stream_buffer_bytes,
                    # As it was at the start: a reload changes the setting, not the sockets.
                    "loopback_only": is_loopback(services.settings.server.host),
                }
            ),
            openapi_config=None,
            logging_config=None,
            request_max_body_size=None,  # the shell counts
        )
        hosts = HostList(services.settings.server.allowed_hosts)
        cors = Cors(services.settings.server.cors_origins)
        self.shell = Shell(
            super().__call__, hosts, limits.body_bytes, services.drain, cors, limits.file_bytes
        )

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        """Without those for pydantic and attrs: importing these would be a third of the daemon's start."""
        return [*plugins, MsgspecDIPlugin()]

    async def __call__(self, scope: Scope | Any, receive: Receive | Any, send: Send | Any) -> None:
        await self.shell(scope, receive, send)


def create_app(services: Services, dialects: Sequence[ControllerRouterHandler] = ()) -> App:
    """`dialects` are the APIs' routes: `opt["access"]` says who may use each; absent means nobody."""
    routes = [*common_routes, *sign_in_routes, *dialects]
    return App(services, [*routes, _openapi_route(routes, services.version)])


def _openapi_route(routes: Sequence[ControllerRouterHandler], version: str) -> ControllerRouterHandler:
    made: list[bytes] = []
    lock = asyncio.Lock()

    @get("/openapi.json", opt={"access": Access.KNOWN}, name="openapi", include_in_schema=False)
    async def openapi() -> Response[bytes]:
        async with lock:
            if not made:  # takes a fraction of a second: not on the loop, not before anybody asks
                made.append(await asyncio.to_thread(document, routes, version))
        return Response(made[0], media_type="application/json")

    return openapi
