"""Messages between a prefill engine and the decode engine that started it, and the link that carries them
(docs/disaggregation.md).

The decode engine is to the prefill engine what the daemon is to any engine: it sends `Start`, `AbortRequest`
and `Shutdown` too, and gets `Ready` and `StepOutputs`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # imports this module
    from .messages import AbortRequest, ToDaemon


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Compute a prompt and hand its full blocks over, from one of them on. No token is drawn from it."""

    request_id: str
    """Unique for each `Prefill`, so that blocks of one that was aborted are not taken for another's."""
    prompt_ids: list[int]
    """Whole blocks, and one token more, so that a known prompt costs one row."""
    first_block: int
    """Blocks before it are in the decode engine."""
    priority: int = 0
    tenant: str = ""
    cache_namespace: str = ""
    """Namespace of the request, without the adapter's name, which each engine puts in front."""
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSlots:
    """Slots of the hand-over segment that were read and may be written again."""

    slots: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedBlock:
    """Block in a slot of the hand-over segment, which is the decode engine's until it sends `TakenSlots`."""

    slot: int
    kind: Literal["kv", "window", "state"]
    block_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedBlocks:
    """Blocks of one `Prefill`, in the order of the prompt."""

    request_id: str
    blocks: list[HandedBlock] = field(default_factory=list)
    is_last: bool = False
    """No more follow."""
    cached_tokens: int = 0
    """Prompt tokens that the prefill engine had in its prefix cache."""


class PrefillLink(Protocol):
    """Prefill engine as the decode engine sees it: it may die, and another one takes its place."""

    @property
    def pid(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_given_up(self) -> bool:
        """True once it died too often: prompts are computed in the decode engine."""
        ...

    @property
    def deaths(self) -> int:
        """Number of engines that ended. All that they sent was received before."""
        ...

    def send(self, message: "Prefill | AbortRequest | TakenSlots") -> None:
        """Send a message, unless the engine is not ready."""
        ...

    def receive(self, *, is_waiting: bool) -> "list[ToDaemon]":
        """Return the messages that have arrived. `is_waiting`: an answer is expected, so an engine that stays
        silent counts as hung.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait for a message."""
        ...

    def close(self) -> None: ...
