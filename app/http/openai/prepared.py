"""What the two kinds of completion have in common once they are checked."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import UNSET

from ...gateway.generation import Generation
from .fields import ChatCompletionRequest, CompletionRequest

Body = TypeVar("Body", ChatCompletionRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Body]):
    """A checked request and what the gateway is to do for it."""

    body: Body
    generation: Generation
    warnings: list[str]

    def extras(self) -> dict[str, Any]:
        """Fields of ours at the end of an answer: the seed, if we drew it, and what was ignored."""
        drawn = self.body.seed is None
        return {"seed": self.generation.params.seed if drawn else UNSET, "warnings": self.warnings or UNSET}

    @property
    def usage_at_end(self) -> bool:
        """A stream ends with a chunk of its own for the usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.continuous_usage_stats)
