"""Record of one finished request: its numbers, the times of its sequences, its prompt and answer (`Content`).
The numbers of an open one, as the dashboards show them.

Times are kept as at most 200 bytes of MessagePack for any hour, written by position: new fields go to the
end, with a default.
"""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from llmbox.engine.ipc.sequence_times import ScheduleRecord

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

    @property
    def total(self) -> int:
        return self.own + self.decoding + self.prompts + self.absent + self.between


NO_PHASE: Final = PhaseRecord()


class SequenceRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Times in microseconds, without gap or overlap, from the request's headers to the sequence's end."""

    total: int
    reading: int = 0
    """Reading and checking the HTTP request."""
    model: int = 0
    """Waiting for the model to be in memory."""
    prompt: int = 0
    """Chat template, tokens, images, grammar."""
    gateway: int = 0
    """Waiting in the daemon: for a place, or an engine."""
    lost: int = 0
    """From being sent to an engine that died to being sent to the next one."""
    sending: int = 0
    """On the way to the engine, which reads its messages between two steps."""
    unsplit: int = 0
    """In an engine that reported no times."""
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


ContentState = Literal["", "kept", "dropped"]
NOT_NOW: Final = {
    "model_loading",
    "model_unloaded",
    "memory_busy",
    "too_many_connections",
    "shutting_down",
    "server_shutdown",
    "draining",
}
"""Error codes of 503 answers that are not failures: the box is busy, starting or stopping, or an operator
decided.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One row of the request log. Times are in seconds; `created` is Unix time, the rest are durations."""

    id: str
    created: float
    model: str
    endpoint: str
    http_status: int
    key: str = ""
    stream: bool = False
    finish_reasons: str = ""
    """One word per choice, comma separated."""
    error_code: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    n: int = 1
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean time per output token after the first."""
    e2e_s: float | None = None
    resumes: int = 0
    """Number of resumes after an engine restart."""
    seed: int | None = None
    params: str = "{}"
    """JSON of the sampling parameters."""
    client: str = ""
    looked_up_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_end: str = ""
    """Reason why the prefix cache had no more: one `PrefixMissReason` per prompt, comma separated. Empty
    without a first token.
    """
    disk_tokens: int = 0
    """Tokens of `cached_tokens` that came from the KV cache on disk."""
    host_tokens: int = 0
    """Tokens of `cached_tokens` that came from main memory to a GPU."""
    draft_tokens: int = 0
    """Draft tokens of speculative decoding that were verified for it."""
    accepted_tokens: int = 0
    """Number of them that were accepted: each saved it a step."""
    output_hash: str = ""
    """Keyed hash of the answer's token ids (`app/gateway/choice_stream.py`); empty where there is none."""
    fingerprint: str = ""
    """Hash of build and settings: with another one the same request may get another answer."""
    tier: str = ""
    """`premium`, `standard` or `background`, by its priority; empty if it reached no engine."""
    trace_id: str = ""
    """Trace of W3C that the request belongs to, from its `traceparent` or drawn for the export of traces."""
    content: ContentState = ""
    """Empty: not allowed to be kept. `dropped`: allowed, but the disk or the queue was full."""

    @property
    def is_failure(self) -> bool:
        """Return whether the server failed: 5xx, engine errors included; not 4xx, not cancellations (499)."""
        return self.http_status >= 500 and self.error_code not in NOT_NOW


RecordOrder = Literal["", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s"]
"""Column whose largest values come first; empty: the newest requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Filter of records to read, newest first."""

    model: str | None = None
    key: str | None = None
    status: int | None = None
    errors_only: bool = False
    since: float | None = None
    before_seq: int | None = None
    """Keyset paging: only rows older than this one."""
    order: RecordOrder = ""
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTotals:
    """Totals of all records that match a filter, without its paging."""

    requests: int = 0
    errors: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    ttft_s: float | None = None
    """Mean time to first token."""
    rate: float | None = None
    """Mean output tokens a second of an answer, after its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDraft:
    """Draft from the gateway. The writer thread makes `Content` of it, since detokenizing takes time."""

    owner: str
    """Id of the key. It survives rotation and is never reused; empty for callers without one."""
    body: str
    """JSON body of the request as it was sent."""
    prompts: Callable[[], list[str]]
    """Returns the rendered prompts, one for each of the request."""
    outputs: list[str]
    """One text per choice, already cut to the largest size that may be kept."""
    output_bytes: int
    size: int
    """Approximate bytes that the draft takes in memory while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Kept texts. The `*_bytes` are the original sizes in UTF-8; a shorter text has been cut."""

    owner: str
    body: str
    body_bytes: int
    prompts: list[str]
    prompt_bytes: int
    outputs: list[str]
    output_bytes: int

    @property
    def is_whole(self) -> bool:
        """Return whether the content suffices to send the request again."""
        return len(self.body.encode()) == self.body_bytes

    def cut_parts(self) -> list[tuple[str, int, int]]:
        """Return (name, bytes kept, original bytes) of each part that was cut."""
        parts = (
            ("request", size_of([self.body]), self.body_bytes),
            ("prompt", size_of(self.prompts), self.prompt_bytes),
            ("output", size_of(self.outputs), self.output_bytes),
        )
        return [part for part in parts if part[1] < part[2]]

    def was_cut(self, part: str) -> bool:
        return any(name == part for name, _, _ in self.cut_parts())


class ContentBudget:
    """Limit on the bytes that wait for the disk. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        with self._lock:
            fits = size <= self._left
            self._left -= size if fits else 0
            return fits

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


def make_content(draft: ContentDraft, most: int) -> Content:
    """Make the content, with at most `most` bytes of each part."""
    prompts = draft.prompts()
    (body,) = cut_texts([draft.body], most)
    return Content(
        owner=draft.owner,
        body=body,
        body_bytes=size_of([draft.body]),
        prompts=cut_texts(prompts, most),
        prompt_bytes=size_of(prompts),
        outputs=cut_texts(draft.outputs, most),
        output_bytes=draft.output_bytes,
    )


def cut_texts(texts: Iterable[str], most: int) -> list[str]:
    """Cut texts to at most `most` bytes of UTF-8 in total. No character is split."""
    kept = []
    for text in texts:
        data = text.encode()
        kept.append(text if len(data) <= most else data[:most].decode(errors="ignore"))
        most -= min(most, len(data))
    return kept


def size_of(texts: Iterable[str]) -> int:
    """Bytes of texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


def to_json(texts: list[str]) -> str:
    return json.dumps(texts, ensure_ascii=False)


class StoreError(Exception):
    """The request log cannot be used now; the message says why."""


def first_line(error: Exception) -> str:
    """First line of an error. The rest of SQLAlchemy's errors is the statement."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """Snapshot of an open request. Times in seconds."""

    id: str
    model: str
    endpoint: str
    key: str
    client: str
    state: str
    """`queued` until the engine has scheduled it, `decode` after the first token."""
    age: float
    stream: bool
    n: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: float | None
    tokens_per_second: float | None
    resumes: int
    looked_up_tokens: int = 0
    prefix_end: str = ""
    """Reason of `RequestRecord.prefix_end`."""
    disk_tokens: int = 0
    """Tokens of `cached_tokens` that came from disk."""
    host_tokens: int = 0
    """Tokens of it that came from main memory to a GPU. These four are known from the first token on."""
    draft_tokens: int = 0
    """Draft tokens that were verified so far."""
    accepted_tokens: int = 0
    """Number of them that were accepted."""
