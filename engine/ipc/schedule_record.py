"""Record of one sequence from which its part in the scheduling can be computed again: counts and places, no
token, no text, no hash.

Written by position: new fields go to the end, with a default.
"""

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import msgspec

ABORTED: Final = 1
"""Ended from outside or by an error, not by its tokens."""
POOLED: Final = 2
POOLED_LAST: Final = 4
PROMPT_LOGPROBS: Final = 8
IMAGES: Final = 16
ADAPTER: Final = 32
LIMITED: Final = 64
"""Its tokens were limited by a grammar or a budget of thoughts."""
DRAFTED: Final = 128
"""It had draft tokens."""
MOST_BYTES: Final = 200
"""Bound of an encoded record; a usual one has 110."""


class EngineFacts(NamedTuple):
    """Facts of the engine that scheduled it: of `SchedulerConfig`, of the block pool and of the executor."""

    context: int
    max_running: int
    token_budget: int
    num_blocks: int
    block_size: int
    caching: bool = True
    chunked: bool = True
    static: bool = False
    ageing: float = 10.0
    """Seconds after which a waiting priority band is lifted."""
    premium_share: float = 0.0
    watermark: float = 0.0
    depth: int = 0
    """Steps launched before the results of an older one are collected."""
    stages: int = 1
    state_slots: int = 0
    window: int = 0
    window_blocks: int = 0
    disk: bool = False
    """Blocks come from disk, or from a prefill engine."""


class ScheduleRecord(NamedTuple):
    """One sequence. Times are in microseconds since the engine's first sequence, lengths in tokens."""

    run: int
    """Random number of the engine process."""
    facts: EngineFacts
    number: int
    """Place in the order of arrivals, from 0."""
    call: int
    """Number of steps that had been scheduled when it came."""
    arrived: int
    prompt: int
    resumed: int
    """Output that it had from an engine that died."""
    output: int
    limit: int
    """Most tokens of output."""
    end_call: int
    """Number of steps that had been scheduled when it ended."""
    ended: int
    flags: int = 0
    priority: int = 0
    tenant: int = 0
    """Number of its caller, by first appearance in this engine."""
    fork: int = -1
    """Number of the sequence whose prompt it shares as another choice of its request; -1: none."""
    owner: int = -1
    """Number of the first ended sequence that had the last of its shared blocks; -1: none."""
    shared: int = 0
    """Number of blocks from its beginning on that earlier sequences had."""


@cache
def _decoder() -> "msgspec.msgpack.Decoder[ScheduleRecord]":
    import msgspec  # noqa: PLC0415 - the engine's core, which makes records, runs without it

    return msgspec.msgpack.Decoder(ScheduleRecord)


def decode_schedule(data: bytes) -> ScheduleRecord | None:
    """Return None for a record that is empty or of another version."""
    try:
        return _decoder().decode(data)
    except ValueError:  # msgspec's errors are such
        return None
