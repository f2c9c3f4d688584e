"""Times of one sequence in the engine, sent once when it has ended, and totals of all steps.

`ScheduleRecord` has what its part in the scheduling can be computed again from: counts and places, no token,
no text, no hash. It is written by position: new fields go to the end, with a default.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

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
"""It had more draft tokens than its record has room for, or some of a model."""
LENGTHENED: Final = 256
"""It grew beyond the short factors of LongRoPE and was computed again."""
MOST_BYTES: Final = 200
"""Bound of an encoded record; a usual one has 110, without drafts."""


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
    mixed_budget: int = 0
    short_context: int = 0
    """Longest sequence with the short factors of LongRoPE; 0: there is one set of factors."""


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
    drafts: bytes = b""
    """Its rows with draft tokens, see `encode_drafts`."""
    short_owner: int = -1
    """Value of `owner` for the blocks that it had before it was computed again with the long factors."""
    short_shared: int = 0

    @property
    def room(self) -> int:
        """Bytes that `drafts` may take."""
        numbers = [each for each in (*self, *self.facts) if isinstance(each, int | float)]
        return MOST_BYTES - 8 - sum(9 if isinstance(each, float) else _packed(each) for each in numbers)


def _packed(number: int) -> int:
    """Return the bytes of a number in MessagePack."""
    if -32 <= number < 128:
        return 1
    return next((1 + size for size in (1, 2, 4) if -(1 << 8 * size - 1) <= number < 1 << 8 * size), 9)


class DraftedRow(NamedTuple):
    """Row of a step that had draft tokens."""

    gap: int
    """Tokens of output since the last such row."""
    drafted: int
    accepted: int


MOST_DRAFTED: Final = 15
"""Most draft tokens of a row."""
_MOST_GAP: Final = 20
"""Gaps from here on take several symbols."""
_END: Final = _MOST_GAP + 1


class _AdaptiveCounts:
    """Counts of the symbols of one kind, which their cost follows. Grow as symbols are met."""

    def __init__(self, size: int) -> None:
        self.counts = [1] * size
        self.total = size

    def learn(self, symbol: int) -> None:
        self.counts[symbol] += 8
        self.total += 8


class _DraftModel:
    def __init__(self) -> None:
        self.gaps, self.drafted = _AdaptiveCounts(_END + 1), _AdaptiveCounts(MOST_DRAFTED + 1)
        self._accepted: dict[int, _AdaptiveCounts] = {}

    def accepted(self, drafted: int) -> _AdaptiveCounts:
        return self._accepted.setdefault(drafted, _AdaptiveCounts(drafted + 1))


def encode_drafts(rows: "Sequence[DraftedRow]", room: int) -> tuple[bytes, bool]:
    """Encode rows in at most `room` bytes. Returns them, and whether all had room.

    Arithmetic coding over counts that adapt, in whole numbers of any size: a row takes about six bits.
    """
    model, low, width, whole = _DraftModel(), 0, 1, 1

    def put(counts: _AdaptiveCounts, symbol: int) -> None:
        nonlocal low, width, whole
        low = low * counts.total + width * sum(counts.counts[:symbol])
        width, whole = width * counts.counts[symbol], whole * counts.total
        counts.learn(symbol)

    kept, is_whole = (low, width, whole), True
    for gap, drafted, accepted in rows:
        while gap >= _MOST_GAP:
            put(model.gaps, _MOST_GAP)
            gap -= _MOST_GAP  # noqa: PLW2901 - the rest of it
        put(model.gaps, gap)
        put(model.drafted, drafted)
        put(model.accepted(drafted), accepted)
        ended = model.gaps
        end_low = low * ended.total + width * sum(ended.counts[:_END])
        candidate = end_low, width * ended.counts[_END], whole * ended.total
        if _size(*candidate) > room:
            is_whole = False
            break
        kept = candidate
    if kept[2] == 1:  # not even one row
        return b"", is_whole
    low, width, whole = kept
    size = _size(low, width, whole)
    return (-(-(low << 8 * size) // whole)).to_bytes(size, "big"), is_whole


def _size(low: int, width: int, whole: int) -> int:
    """Return the fewest bytes of a fraction in [low, low + width) / whole."""
    size = max(1, (whole.bit_length() - width.bit_length()) // 8)
    while -(-(low << 8 * size) // whole) * whole >= (low + width) << 8 * size:
        size += 1
    return size


def decode_drafts(data: bytes) -> list[DraftedRow]:
    """Decode rows of `encode_drafts`. Raises ValueError for other bytes."""
    if not data:
        return []
    model, rows = _DraftModel(), list[DraftedRow]()
    value, whole = int.from_bytes(data, "big"), 1 << 8 * len(data)

    def take(counts: _AdaptiveCounts) -> int:
        nonlocal value, whole
        wanted, before = value * counts.total // whole, 0
        for symbol, count in enumerate(counts.counts):
            if wanted < before + count:
                value = value * counts.total - before * whole
                whole *= count
                counts.learn(symbol)
                return symbol
            before += count
        raise ValueError("no draft rows")

    while len(rows) <= 8 * MOST_BYTES:
        gap = 0
        while (symbol := take(model.gaps)) == _MOST_GAP:
            gap += _MOST_GAP
        if symbol == _END:
            return rows
        drafted = take(model.drafted)
        rows.append(DraftedRow(gap + symbol, drafted, take(model.accepted(drafted))))
    raise ValueError("no draft rows")


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


@dataclass(slots=True, kw_only=True)
class PhaseTimes:
    """Time of one phase, in seconds, and what else was in its steps.

    A step's time is divided equally among its tokens. The five times add up to the time of the phase.
    """

    own: float = 0.0
    """Share of its own tokens."""
    decoding: float = 0.0
    """Shares of other sequences' answers in the same steps."""
    prompts: float = 0.0
    """Shares of other sequences' prompts in the same steps."""
    absent: float = 0.0
    """Steps without a token of it, while it was running."""
    between: float = 0.0
    """Time between steps: scheduling, messages, images, blocks to and from disk."""
    steps: int = 0
    mixed: int = 0
    """Number of `steps` that had other sequences' prompts."""
    others: int = 0
    """Number of other sequences in each step, summed over `steps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTimes:
    """Times from arrival to end. The waits and the phases add up to `ended_at - arrived_at`."""

    arrived_at: float
    """CLOCK_MONOTONIC seconds, as `ended_at`."""
    ended_at: float
    queued: float = 0.0
    """Wait for its first admission, in seconds."""
    preempted: float = 0.0
    """Waits after preemptions."""
    preemptions: int = 0
    prefill: PhaseTimes = field(default_factory=PhaseTimes)
    """Phase of its prompt, and of tokens from before an engine's death."""
    recompute: PhaseTimes = field(default_factory=PhaseTimes)
    """Phase of tokens that were computed again after a preemption."""
    decode: PhaseTimes = field(default_factory=PhaseTimes)
    schedule: ScheduleRecord | None = None
    """None: none was made."""


@dataclass(slots=True, kw_only=True)
class StepWork:
    """Counters of steps whose results were taken: differences of two tell the time of the steps between. Not
    changed once made.
    """

    steps: int = 0
    seconds: float = 0.0
    decode_rows: int = 0
    """Rows of one token."""
    prefill_steps: int = 0
    """Steps with prompts, in which decoding requests wait for them."""
    prefill_seconds: float = 0.0
    """Time of these steps, with that of their decoding requests."""
    prefill_tokens: int = 0
    """Prompt tokens computed, without those found in a cache and with those computed again."""
