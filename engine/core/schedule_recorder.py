"""Recorder of what the scheduler was given, for `schedule_replay.py`: one small record for each sequence.

Prefixes are recorded as places: "its first 12 blocks are those of sequence 40". The hashes by which the
recorder finds that stay in memory, and no hash is made for it that the prefix cache did not need.
"""

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ..config import SchedulerConfig
from ..ipc.schedule_record import (
    ABORTED,
    ADAPTER,
    DRAFTED,
    IMAGES,
    LIMITED,
    POOLED,
    POOLED_LAST,
    PROMPT_LOGPROBS,
    DraftedRow,
    EngineFacts,
    ScheduleRecord,
    encode_drafts,
)
from .microbatching import ONE_STAGE, PipelineDepth
from .outputs import finish_reason

if TYPE_CHECKING:
    from .kv_cache.manager import KVCacheManager
    from .request import Request
    from .step import ScheduledRequest

LEAST_BLOCKS: Final = 8192
_MOST_TENANTS: Final = 10_000
_MOST_DRAFTED_ROWS: Final = 1000
"""Rows with drafts that are remembered of a sequence: more than a record has room for."""
_KEY_BYTES: Final = 8
"""Bytes of a block's hash that tell it from others here; a mix-up would only spoil a replay."""


class _Arrival(NamedTuple):
    number: int
    call: int
    resumed: int
    fork: int


@dataclass(slots=True)
class _Drafts:
    """Rows of a sequence that had draft tokens."""

    end: int
    """Tokens of output after the last one."""
    rows: list[DraftedRow] = field(default_factory=list)
    is_whole: bool = True


class ScheduleRecorder:
    """Written by the scheduler. Remembers the blocks of ended sequences: twice those of the pool at most."""

    def __init__(self, config: SchedulerConfig, kv_cache: "KVCacheManager") -> None:
        self._config, self._kv_cache, self._pool = config, kv_cache, kv_cache.pool
        self._run = secrets.randbits(32)
        self._calls = self._count = 0
        self._pipeline = ONE_STAGE
        self._facts: EngineFacts | None = None
        self._origin: float | None = None
        self._arrivals: dict[str, _Arrival] = {}
        self._drafts: dict[str, _Drafts] = {}
        self._tenants: dict[str, int] = {}
        self._owners: OrderedDict[bytes, int] = OrderedDict()
        self._most_blocks = max(LEAST_BLOCKS, 2 * kv_cache.pool.num_blocks)

    def note_step(self, pipeline: PipelineDepth) -> None:
        """Count a call of `schedule`."""
        self._calls += 1
        self._pipeline = pipeline

    def begin(self, request: "Request", sibling: "Request | None") -> None:
        """Record the arrival of a sequence. `sibling`: the choice whose prompt it shares."""
        if self._origin is None:
            self._origin = request.arrived_at
        of_sibling = None if sibling is None else self._arrivals.get(sibling.request_id)
        fork = -1 if of_sibling is None else of_sibling.number
        self._arrivals[request.request_id] = _Arrival(self._count, self._calls, request.num_output, fork)
        self._count += 1

    def note_drafts(self, row: "ScheduledRequest", taken: int, *, is_of_model: bool) -> None:
        """Record a row with draft tokens that gave `taken` tokens. What a model proposes may be fewer tokens
        than it was given blocks for: no replay knows that.
        """
        name, end = row.request.request_id, row.request.num_output
        drafts = self._drafts.get(name)
        if drafts is None:
            drafts = self._drafts[name] = _Drafts(self._arrivals[name].resumed)
        drafts.is_whole &= not is_of_model and len(drafts.rows) < _MOST_DRAFTED_ROWS
        if drafts.is_whole:
            drafts.rows.append(DraftedRow(end - taken - drafts.end, len(row.drafts), taken - 1))
            drafts.end = end

    def end(self, request: "Request", now: float) -> ScheduleRecord:
        """Return the record of a sequence that leaves, with whatever end."""
        arrival = self._arrivals.pop(request.request_id)
        owner, shared = self._link(arrival.number, request.block_hashes) if self._pool.caching else (-1, 0)
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.clear()  # callers may then have numbers of earlier ones: a replay shares otherwise
        record = ScheduleRecord(
            run=self._run,
            facts=self._facts_now(),
            number=arrival.number,
            call=arrival.call,
            arrived=self._micros(request.arrived_at),
            prompt=request.num_prompt,
            resumed=arrival.resumed,
            output=request.num_output,
            limit=request.params.max_tokens,
            end_call=self._calls,
            ended=self._micros(now),
            flags=_flags(request),
            priority=request.priority,
            tenant=self._tenants.setdefault(request.tenant, len(self._tenants)),
            fork=arrival.fork,
            owner=owner,
            shared=shared,
        )
        if (drafts := self._drafts.pop(request.request_id, None)) is None:
            return record
        data, has_room = encode_drafts(drafts.rows, record.room)
        is_whole = has_room and drafts.is_whole
        return record._replace(drafts=data, flags=record.flags | (0 if is_whole else DRAFTED))

    def _micros(self, at: float) -> int:
        return round(1e6 * (at - (self._origin or 0.0)))

    def _link(self, number: int, hashes: list[bytes]) -> tuple[int, int]:
        """Return (owner of the last known block, number of known blocks), and remember all of them.

        The last ones are forgotten first: without its beginning the rest of a prefix is of no use.
        """
        owners = self._owners
        keys = [block[:_KEY_BYTES] for block in hashes[: self._most_blocks]]
        owner, shared = -1, 0
        for key in keys:
            found = owners.get(key)
            if found is None:
                break
            owner, shared = found, shared + 1
        for place in range(len(keys) - 1, -1, -1):
            if place >= shared:
                owners[keys[place]] = number
            owners.move_to_end(keys[place])
        while len(owners) > self._most_blocks:
            owners.popitem(last=False)
        return owner, shared

    def _facts_now(self) -> EngineFacts:
        if self._facts is None:
            config, pool, pipeline = self._config, self._pool, self._pipeline
            self._facts = EngineFacts(
                context=config.context,
                max_running=config.max_running,
                token_budget=config.token_budget,
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
                caching=pool.caching,
                chunked=config.chunked_prefill,
                static=config.batching == "static",
                ageing=config.ageing_seconds,
                premium_share=config.premium_share,
                watermark=config.watermark,
                depth=pipeline.ahead + pipeline.stages - 1,
                stages=pipeline.stages,
                state_slots=config.state_slots,
                window=config.window,
                window_blocks=config.window_blocks,
                disk=self._kv_cache.tiers is not None or self._kv_cache.intake is not None,
                mixed_budget=config.mixed_budget,
            )
        return self._facts


def _flags(request: "Request") -> int:
    is_done = request.num_computed == request.num_tokens if request.pools else finish_reason(request)
    told = (
        (ABORTED, not is_done),
        (POOLED, request.pools),
        (POOLED_LAST, request.params.pooling == "last"),
        (PROMPT_LOGPROBS, request.params.prompt_logprobs is not None),
        (IMAGES, bool(request.images)),
        (ADAPTER, bool(request.adapter)),
        (LIMITED, request.constraint is not None),
    )
    return sum(flag for flag, holds in told if holds)
