"""Deadlines of a request: from its fields, and from the server's settings where those are shorter."""

from dataclasses import dataclass

from .request_context import RequestContext
from .request_types import GenerationFields


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
