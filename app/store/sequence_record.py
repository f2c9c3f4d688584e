"""Times of one sequence as the request log keeps them: at most 200 bytes of MessagePack for any hour.

Written by position: new fields go to the end, with a default.
"""

from typing import Final

import msgspec

from llmbox.engine.ipc.schedule_record import ScheduleRecord

MOST_SEQUENCES: Final = 128
"""Sequences of a request whose times are kept: those that ended last."""


class PhaseRecord(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """`PhaseTimes` of the engine, in microseconds."""

    own: int = 0
    decoding: int = 0
    prompts: int = 0
    absent: int = 0
    between: int = 0
    steps: int = 0
    mixed: int = 0
    others: int = 0


NO_PHASE: Final = PhaseRecord()


class SequenceRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Times in microseconds, without gap or overlap, from the request's headers to the sequence's end."""

    total: int
    reading: int = 0
    """Reading and checking the HTTP request."""
    model: int = 0
    """Waiting for the model to be in memory."""
    prompt: int = 0
    """Chat template, tokens, pictures, grammar."""
    gateway: int = 0
    """Waiting in the daemon: for a place, or an engine."""
    lost: int = 0
    """From being sent to an engine that died to being sent to the next one."""
    sending: int = 0
    """On the way to the engine, which reads its messages between two steps."""
    unsplit: int = 0
    """In an engine that told no times."""
    queued: int = 0
    preempted: int = 0
    prefill: PhaseRecord = NO_PHASE
    recompute: PhaseRecord = NO_PHASE
    decode: PhaseRecord = NO_PHASE
    delivery: int = 0
    """From the engine's last token to the end of the answer, without `client`."""
    client: int = 0
    """Waiting for a client that did not read, after the engine's last token."""
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    schedule: bytes = b""
    """`ScheduleRecord` of the engine, encoded: at most 200 bytes more."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(SequenceRecord).decode


def encode_sequence(record: SequenceRecord) -> bytes:
    return _encode(record)


def encode_schedule(record: ScheduleRecord | None) -> bytes:
    """Encode it for `SequenceRecord.schedule`; nothing for none."""
    return b"" if record is None else _encode(record)


def decode_sequence(data: bytes) -> SequenceRecord | None:
    """Return None for a record that this version cannot read."""
    try:
        return _decode(data)
    except msgspec.MsgspecError:
        return None
