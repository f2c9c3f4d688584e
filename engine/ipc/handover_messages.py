"""Messages between a prefill engine and the decode engine that started it (docs/disaggregation.md).

The decode engine is to the prefill engine what the daemon is to any engine: it sends `Start`, `AbortRequest`
and `Shutdown` too, and gets `Ready` and `StepOutputs`.
"""

from dataclasses import dataclass, field
from typing import Literal


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
