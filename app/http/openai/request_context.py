"""Frame of the routes that generate: caller, model and limits of a request, its deadlines, refusals in the
log, a stream or one answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from litestar import Response, post
from litestar.types import Receive
from msgspec import UNSET

from ...config.settings import LimitSettings
from ...engines.admission import QueueReservation
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError, unavailable
from ...gateway.gateway import Gateway, max_in_engine, model_limit, system_fingerprint
from ...gateway.generation import ContentRetention, Generation, deadline_error
from ...gateway.open_request import CLIENT_CLOSED, OpenRequest
from ...gateway.request_times import ExchangeClock
from ...security.security import Identity
from ...services import Services
from ...util.threads import TENANT
from ..auth.guard import Access, identity_of
from ..server.errors import ClientGone
from ..server.request import CLOCK, StrictRequest, is_local_socket, request_id
from ..server.sse import (
    DEFAULT_OPTIONS,
    EventStreamResponse,
    SseOptions,
    ended_by_disconnect,
    while_connected,
)
from .request_types import ChatCompletionRequest, CompletionRequest, GenerationFields
from .sampling import invalid
from .unsupported import refuse_foreign, unknown_fields


@dataclass(slots=True)
class RequestContext:
    """One HTTP exchange of a generating route."""

    services: Services
    endpoint: str
    """Path of the route."""
    exchange: str
    """Request id of the exchange, as the client sent it or generated."""
    client: str
    """IP address of the client, "unix socket", or "" where it is unknown."""
    caller: Identity
    plain: dict[str, Any]
    """Body as parsed JSON."""
    body: bytes = b""
    """Body as it was sent."""
    receive: Receive | None = None
    """Channel that reports the end of the connection; None where no client waits."""
    clock: ExchangeClock = field(default_factory=lambda: ExchangeClock(arrived=time.monotonic()))

    @classmethod
    async def of(cls, request: StrictRequest) -> "RequestContext":
        posted = request.method == "POST"
        client = "unix socket" if is_local_socket(request) else request.client.host if request.client else ""
        clock = request.scope["state"].get(CLOCK) or ExchangeClock()
        services = request.services
        if clock.trace is None:
            headers = request.headers.getall("traceparent", [])
            clock.trace = services.gateway.tracer.begin(headers, request.scope.get("server"))
        call = cls(
            services,
            request.scope["path"],
            request_id(request),
            client,
            identity_of(request),
            plain=await request.plain_json() if posted else {},
            body=await request.body() if posted else b"",
            receive=request.receive if posted else None,
            clock=clock,
        )
        clock.arrived = time.monotonic()
        TENANT.set(call.caller.tenant)
        return call

    @property
    def gateway(self) -> Gateway:
        gateway: Gateway = self.services.gateway
        return gateway

    @property
    def limits(self) -> LimitSettings:
        return self.services.settings.limits

    def keep(self) -> ContentRetention | None:
        """Return the content of this request that the log may keep."""
        keyless = self.services.settings.requests.log_content
        if not self.caller.keeps_content(keyless=keyless):
            return None
        return ContentRetention("" if self.caller.key is None else self.caller.key.id, self.body.decode())

    async def find_model(self, name: str | None, deadlines: "Deadlines | None" = None) -> LoadedModel:
        """Return the model, loading it from disk if needed. `deadlines`, by default the configured ones,
        bound the wait.

        Raises ClientGone as soon as the client leaves; the load continues, as others may wait for it.
        """
        if name is not None:
            self.caller.require_model(name)
        asked = time.monotonic()
        deadlines = deadlines or Deadlines.of(self)
        by = deadlines.next
        try:
            async with asyncio.timeout(None if by is None else by - asked):
                model = await self._find_model(name)
        except TimeoutError:
            code = "request_timeout" if by == deadlines.finish_by else "first_token_timeout"
            raise deadline_error("its model was in memory", code) from None
        finally:
            self.clock.model_s += time.monotonic() - asked
        if name is None:
            self.caller.require_model(model.name)
        if model.supervisor.info is None:
            raise unavailable(f"{model.name} is not ready.", "model_loading", retry_after=2)
        return model

    async def _find_model(self, name: str | None) -> LoadedModel:
        services = self.services
        if services.find_model is None:
            return services.engines.get(name)
        if self.receive is None or name is None or services.engines.find(name) is not None:
            return await services.find_model(name)
        async with ended_by_disconnect(self.receive):
            return await services.find_model(name)

    def reserve(self, model: LoadedModel, choices: int, *, pools: bool = False) -> QueueReservation:
        """Hold places in the model's queue while the prompts are made. Raises ApiError 429 and 503."""
        places = max_in_engine(model, choices, pools=pools, queue=self.limits.queue)
        return model.supervisor.reserve(places, self.caller.tenant)

    def warnings(self, kind: type[msgspec.Struct]) -> list[str]:
        return unknown_fields(kind, self.plain)

    def generation_fields(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        deadlines: "Deadlines",
        reservation: QueueReservation,
    ) -> dict[str, Any]:
        """Return the fields of a `Generation` that chats and completions have in common."""
        return {
            **self.caller_fields(body.priority, body.cache_salt),
            "n": body.n or 1,
            "keep_stop": bool(body.include_stop_str_in_output),
            "stream": bool(body.stream),
            "reservation": reservation,
            "finish_by": deadlines.finish_by,
            "first_token_by": deadlines.first_token_by,
        }

    def caller_fields(self, priority: int | None, cache_salt: str | None) -> dict[str, Any]:
        """Return the fields of a `Generation` that depend on the caller."""
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
            "drain": self.services.drain,
        }

    def allowed(self) -> Callable[[], bool] | None:
        """Return the check that is repeated while the request runs: a key may be revoked meanwhile."""
        caller, security = self.caller, self.services.security
        if caller.key is None and caller.session is None:
            return None
        return lambda: security.is_valid(caller)

    @contextmanager
    def recording_refusals(self) -> Iterator[None]:
        """Log errors before the gateway takes over, and clients that left, as separate requests.

        Raises ApiError 400 for fields of other servers that would have changed the answer.
        """
        try:
            refuse_foreign(self.plain)
            yield
        except ApiError as error:
            self._record_refusal(error)
            raise
        except ClientGone:
            message = "The client left before its request was with an engine."
            self._record_refusal(ApiError(CLIENT_CLOSED, message, code="client_disconnected"))
            raise

    def _record_refusal(self, error: ApiError) -> None:
        model = self.plain.get("model")
        name = model if isinstance(model, str) else ""
        self.gateway.record_refusal(
            self.exchange, self.endpoint, name, error, key=self.caller.name, clock=self.clock
        )


Prepared = TypeVar("Prepared")


def inference_route(path: str, operation_id: str | None = None) -> post:
    """Declare a POST route for callers who may use models. Without `operation_id` it is not in the API
    description.
    """
    return post(
        path,
        status_code=200,
        opt={"access": Access.INFER},
        operation_id=operation_id,
        include_in_schema=operation_id is not None,
    )


async def answer(
    request: StrictRequest,
    prepare: Callable[[RequestContext], Coroutine[Any, Any, Prepared]],
    complete: Callable[[RequestContext, Prepared], Coroutine[Any, Any, Any]],
    stream: Callable[[RequestContext, Prepared], AsyncIterator[bytes]] | None = None,
    options: SseOptions = DEFAULT_OPTIONS,
) -> Response[Any]:
    """Prepare a request, with its refusals in the log, then stream it or wait for the whole answer.

    `complete` returns the answer, or its JSON as bytes. It is cancelled when the client disconnects. `stream`
    is None for a request that wants one answer.
    """
    call = await RequestContext.of(request)
    with call.recording_refusals():
        prepared = await prepare(call)
    if stream is not None:
        return EventStreamResponse(stream(call, prepared), options)
    made = await while_connected(request.receive, complete(call, prepared))
    return Response(made, media_type="application/json") if isinstance(made, bytes) else Response(made)


Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class CheckedRequest(Generic[Body]):
    """A checked request and the generation that the gateway is to run for it."""

    body: Body
    generation: Generation
    warnings: list[str]

    @property
    def model_name(self) -> str:
        """Name of the model in the answer. A model that was named by an alias answers under the alias."""
        return self.body.model or self.generation.model.name

    def header(self, opened: OpenRequest) -> dict[str, Any]:
        """Return the fields that an answer and all its chunks begin with."""
        return {
            "id": self.generation.id,
            "created": opened.created,
            "model": self.model_name,
            "system_fingerprint": system_fingerprint(self.generation.model),
        }

    def add_extras(self, opened: OpenRequest, chunk: msgspec.Struct) -> None:
        """Set the fields of `extras` in the last chunk of an answer."""
        for name, value in self.extras(opened).items():
            setattr(chunk, name, value)

    def extras(self, opened: OpenRequest) -> dict[str, Any]:
        """Return llmbox's own fields at the end of an answer: warnings, and the seed if the server
        drew it.
        """
        drawn = self.body.seed is None
        return {
            "seed": self.generation.params.seed if drawn else UNSET,
            "warnings": self.warnings_at_end(opened) or UNSET,
        }

    def warnings_at_end(self, opened: OpenRequest) -> list[str]:
        """Return the warnings: ignored fields, and a structured answer that was cut short."""
        params = self.generation.params
        follows = params.grammar is not None and not params.triggers
        if not follows or all(each.finish_reason != "length" for each in opened.sequences):
            return [*self.warnings, *self.generation.remarks]
        where = "the end of the context"
        if self.generation.remarks:
            where = "its time limit"
        elif self.generation.max_tokens is not None:
            where = f"'{self.generation.max_tokens_param}' ({self.generation.max_tokens})"
        return [
            *self.warnings,
            *self.generation.remarks,
            f"The answer was cut at {where}: the required format is not complete.",
        ]

    @property
    def usage_at_end(self) -> bool:
        """True if a stream ends with a separate chunk for the usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.continuous_usage_stats)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Points in time on the clock of `time.monotonic()`."""

    finish_by: float | None
    first_token_by: float | None

    @classmethod
    def of(cls, call: RequestContext, fields: GenerationFields | None = None) -> "Deadlines":
        limits = call.limits
        most, most_to_first = limits.request_timeout, limits.first_token_timeout
        if call.caller.is_background:  # no client waits: the batch's own deadline bounds it
            most = most_to_first = 0.0
        asked = (None, None) if fields is None else (fields.timeout, fields.first_token_timeout)
        return cls(_at(call, asked[0], most), _at(call, asked[1], most_to_first))

    @property
    def next(self) -> float | None:
        return min((at for at in (self.finish_by, self.first_token_by) if at is not None), default=None)


def _at(call: RequestContext, asked: float | None, most: float) -> float | None:
    seconds = [value for value in (asked, most or None) if value is not None]
    return call.clock.arrived + min(seconds) if seconds else None


def check_prompts(prompts: list[list[int]], param: str, model: LoadedModel) -> None:
    """Check that every prompt has tokens and that the model has an embedding for each. Raises
    ApiError 400.
    """
    size = model.info.vocab_size
    for i, ids in enumerate(prompts):
        place = param if len(prompts) == 1 else f"{param}[{i}]"
        if not ids:
            raise invalid(place, "the prompt has no tokens; at least one is required")
        if max(ids) >= size:
            raise invalid(place, f"token id {max(ids)} is not in the vocabulary of {size}")


def truncate_prompts(
    prompts: list[list[int]], most: int | None, max_tokens: int | None, model: LoadedModel
) -> tuple[list[list[int]], list[str]]:
    """Keep the last `most` ids of each prompt (-1: as many as leave room for `max_tokens`). Returns the
    prompts and a warning if something was cut.

    Raises ApiError 400 for a length that no prompt may have.
    """
    if most is None:
        return prompts, []
    limit = model_limit(model)
    if most == 0 or most > limit:
        raise invalid(
            "truncate_prompt_tokens", f"it must be -1, or 1 to this model's context of {limit} tokens"
        )
    keep = most if most > 0 else limit - max(max_tokens or 1, 1)
    if keep < 1:
        raise invalid("truncate_prompt_tokens", "the requested output leaves no room for a prompt")
    info = model.supervisor.info
    place = "beginning"
    if info is not None and info.pooling in {"embed", "classify"}:  # an encoder's first token must stay
        place = "end"
        cut = [ids if len(ids) <= keep else [*ids[: keep - 1], ids[-1]] for ids in prompts]
    else:
        cut = [ids[-keep:] for ids in prompts]
    lost = sum(map(len, prompts)) - sum(map(len, cut))
    where = "The prompt" if len(prompts) == 1 else "Prompts"
    text = f"{where} lost {lost} tokens at the {place}, as 'truncate_prompt_tokens' asks."
    return cut, [text] if lost else []
