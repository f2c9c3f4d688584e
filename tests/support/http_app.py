"""The application in process, over fakes of what stands behind it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from llmbox.app.config.settings import LimitSettings, ServerSettings, Settings
from llmbox.app.engines.loaded_model import ModelReadiness, Readiness
from llmbox.app.http.app import App, create_app
from llmbox.app.http.server.request import LOCAL
from llmbox.app.lifecycle.drain import Drain
from llmbox.app.metrics import Metrics
from llmbox.app.security.security import Security


@dataclass
class FakeEngines:
    state: tuple[bool, str] = (True, "")

    models: Sequence[ModelReadiness] = ()

    def readiness(self) -> Readiness:
        return Readiness(*self.state, self.models)


def security_in(folder: Path, clock: Callable[[], float] = time.monotonic) -> Security:
    return Security.of(*(folder / f"{name}.json" for name in ("keys", "keys-used", "keys-quota")), clock)


@dataclass
class FakeServices:
    """The part of `Services` that the HTTP shell itself touches."""

    settings: Settings = field(default_factory=Settings)
    engines: FakeEngines = field(default_factory=FakeEngines)
    metrics: Metrics = field(default_factory=Metrics)
    drain: Drain = field(default_factory=Drain)
    security: Security = field(default_factory=lambda: security_in(Path("/nonexistent")))
    version: str = "0.0.0"


def fake_services(**limits: Any) -> FakeServices:
    return FakeServices(Settings(limits=replace(LimitSettings(), **limits)))


def allowing(*hosts: str) -> FakeServices:
    return FakeServices(Settings(server=replace(ServerSettings(), allowed_hosts=hosts)))


def make_app(handlers: Sequence[Any] = (), services: Any = None) -> App:
    return create_app(services or fake_services(), handlers)


def over_unix(app: Any) -> Any:
    """The same app, reached as over the daemon's unix socket."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "extensions": {LOCAL: {}}}, receive, send)

    return wrapped


def guarded(folder: Path, clock: Callable[[], float] = time.monotonic, **server: Any) -> FakeServices:
    """With keys in `folder`."""
    settings = Settings(server=replace(ServerSettings(), **server))
    return FakeServices(settings, security=security_in(folder, clock))


def client(app: Any, host: str = "localhost", peer: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True, client=(peer, 40_000))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", **options)
