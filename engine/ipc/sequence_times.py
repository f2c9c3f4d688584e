"""Times of one sequence in the engine, sent once when it has ended, and totals of all steps."""

from dataclasses import dataclass, field

from .schedule_record import ScheduleRecord


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
    """Time between steps: scheduling, messages, pictures, blocks to and from disk."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Counters of steps whose results were taken: differences of two tell the time of the steps between."""

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
