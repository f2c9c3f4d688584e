"""Context of a generating request: caller, model, log and limits."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from litestar import Request
from litestar.datastructures import State

from ...config.settings import LimitSettings
from ...engines.admission import QueueReservation
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.gateway import Gateway, max_in_engine, system_fingerprint
from ...gateway.generation import ContentRetention, deadline_error
from ...gateway.request_times import ExchangeClock
from ...security.security import Identity
from ...services import Services
from ..auth.guard import identity_of
from ..server.request import CLOCK, StrictRequest, is_local_socket, request_id
from .unsupported import refuse_foreign, unknown_fields

HttpRequest = Request[Any, Any, State]


@dataclass(slots=True)
class RequestContext:
    """One HTTP exchange of a generating route. `model` is set once it is found."""

    services: Services
    endpoint: str
    exchange: str
    client: str
    caller: Identity
    plain: dict[str, Any]
    body: bytes = b""
    """Body as it was sent."""
    arrived: float = field(default_factory=time.monotonic)
    clock: ExchangeClock = field(default_factory=ExchangeClock)

    def __post_init__(self) -> None:
        self.clock.arrived = self.arrived

    @classmethod
    async def of(cls, request: HttpRequest) -> "RequestContext":
        assert isinstance(request, StrictRequest)
        posted = request.method == "POST"
        client = "unix socket" if is_local_socket(request) else request.client.host if request.client else ""
        clock = request.scope["state"].get(CLOCK) or ExchangeClock()
        services: Services = request.app.state.services
        if clock.trace is None:
            headers = request.headers.getall("traceparent", [])
            clock.trace = services.gateway.tracer.begin(headers, request.scope.get("server"))
        return cls(
            services,
            request.scope["path"],
            request_id(request),
            client,
            identity_of(request),
            await request.plain_json() if posted else {},
            await request.body() if posted else b"",
            clock=clock,
        )

    @property
    def gateway(self) -> Gateway:
        gateway: Gateway = self.services.gateway
        return gateway

    @property
    def limits(self) -> LimitSettings:
        return self.services.settings.limits

    def keep(self) -> ContentRetention | None:
        """Return what the log may hold of this request besides its numbers."""
        keyless = self.services.settings.requests.log_content
        if not self.caller.keeps_content(keyless=keyless):
            return None
        return ContentRetention("" if self.caller.key is None else self.caller.key.id, self.body.decode())

    async def find_model(self, name: str | None, by: float | None = None) -> LoadedModel:
        """Return the model, loading it from disk if needed. `by` (of `time.monotonic()`) bounds the wait."""
        if name is not None:
            self.caller.require_model(name)
        asked = time.monotonic()
        try:
            async with asyncio.timeout(None if by is None else by - time.monotonic()):
                model = await self._find_model(name)
        except TimeoutError:
            raise deadline_error("its model was in memory", "request_timeout") from None
        finally:
            self.clock.model_s += time.monotonic() - asked
        if name is None:
            self.caller.require_model(model.name)
        if model.supervisor.info is None:
            raise ApiError(
                503,
                f"{model.name} is not ready.",
                code="model_loading",
                type="server_error",
                headers={"Retry-After": "2"},
            )
        return model

    async def _find_model(self, name: str | None) -> LoadedModel:
        services = self.services
        return services.engines.get(name) if services.find_model is None else await services.find_model(name)

    def reserve(self, model: LoadedModel, choices: int, *, pools: bool = False) -> QueueReservation:
        """Hold places in the model's queue while the prompts are made. Raises ApiError 429 and 503."""
        places = max_in_engine(model, choices, pools=pools, queue=self.limits.queue)
        return model.supervisor.reserve(places, self.caller.tenant)

    def warnings(self, kind: type[msgspec.Struct]) -> list[str]:
        return unknown_fields(kind, self.plain)

    def caller_fields(self, priority: int | None, cache_salt: str | None) -> dict[str, Any]:
        """Return the fields of a `Generation` that are the caller's."""
        caller = self.caller
        return {
            "endpoint": self.endpoint,
            "priority": caller.priority(priority),
            "tenant": caller.tenant,
            "cache_salt": caller.cache_namespace(cache_salt or ""),
            "key": caller.name,
            "meter": caller.meter,
            "still_authorized": self.allowed(),
            "client": self.client,
            "keep": self.keep(),
            "clock": self.clock,
        }

    def allowed(self) -> Callable[[], bool] | None:
        """Return the check that is repeated while the request runs: a key may be revoked meanwhile."""
        caller, security = self.caller, self.services.security
        if caller.key is None and caller.session is None:
            return None
        return lambda: security.is_valid(caller)

    @contextmanager
    def recording_refusals(self) -> Iterator[None]:
        """Log errors before the gateway takes over as requests of their own.

        Raises ApiError 400 for fields of other servers that would have changed the answer.
        """
        try:
            refuse_foreign(self.plain)
            yield
        except ApiError as error:
            model = self.plain.get("model")
            name = model if isinstance(model, str) else ""
            self.gateway.record_refusal(
                self.exchange, self.endpoint, name, error, key=self.caller.name, clock=self.clock
            )
            raise


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Fields that all chunks of an answer repeat."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, id_: str, created: int, asked: str | None, model: LoadedModel) -> "ChunkHeader":
        """Build the header. A model that was named by an alias answers under the alias."""
        return cls(id_, created, asked or model.name, system_fingerprint(model))
