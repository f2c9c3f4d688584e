"""Base of checked chat and completion requests, with their deadlines."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import UNSET

from ...gateway.generation import Generation
from ...gateway.open_request import OpenRequest
from .request_context import RequestContext
from .request_types import ChatCompletionRequest, CompletionRequest, GenerationFields

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
