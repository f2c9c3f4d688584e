"""Frame of routes that generate: declaration, deadlines, recorded refusals, a stream or one answer."""

from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from litestar import Response, post
from msgspec import UNSET

from ...gateway.generation import Generation
from ...gateway.open_request import OpenRequest
from ..auth.guard import Access
from ..server.sse import DEFAULT_OPTIONS, EventStreamResponse, SseOptions, while_connected
from .request_context import HttpRequest, RequestContext
from .request_types import ChatCompletionRequest, CompletionRequest, GenerationFields

Prepared = TypeVar("Prepared")


def inference_route(path: str, name: str, operation_id: str | None = None) -> post:
    """Declare a POST route for callers who may use models. Without `operation_id` it is not in the API
    description.
    """
    return post(
        path,
        status_code=200,
        opt={"access": Access.INFER},
        name=name,
        operation_id=operation_id,
        include_in_schema=operation_id is not None,
    )


async def answer(
    request: HttpRequest,
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
    return call.arrived + min(seconds) if seconds else None
