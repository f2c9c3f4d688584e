"""What is recorded of a sequence: small, with places in place of hashes, and bounded in memory."""

import random
from contextlib import suppress

import msgspec
import pytest

from llmbox.app.store.record import encode_schedule
from llmbox.engine.core.kv_cache.prefix_cache import BlockOwners
from llmbox.engine.core.speculation.draft_choice import MOST_DRAFTS
from llmbox.engine.ipc.sequence_times import (
    ABORTED,
    LENGTHENED,
    MOST_BYTES,
    MOST_DRAFTED,
    DraftedRow,
    EngineFacts,
    ScheduleRecord,
    decode_drafts,
    decode_schedule,
    encode_drafts,
)
from support.clock import Clock
from support.scheduling import make_request, make_scheduler, step

MOST = 2**31


def run(scheduler, *requests):
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    return [times.schedule for times in scheduler.ledger.take().values()]


def test_a_record_of_a_day_s_largest_numbers_is_small():
    day = 86_400 * 10**6
    facts = EngineFacts(
        context=10**6,
        max_running=4096,
        token_budget=65_536,
        num_blocks=10**6,
        block_size=16,
        premium_share=0.25,
        watermark=0.01,
        depth=4,
        stages=4,
        state_slots=70_000,
        window=70_000,
        window_blocks=10**6,
        short_context=70_000,
    )
    record = ScheduleRecord(
        run=2**32 - 1,
        facts=facts,
        number=10**7,
        call=10**8,
        arrived=day,
        prompt=10**6,
        resumed=10**6,
        output=10**6,
        limit=10**6,
        end_call=10**8,
        ended=day,
        flags=511,
        priority=-(2**31),
        tenant=10_000,
        fork=10**7,
        owner=10**7,
        shared=10**5,
        short_owner=10**7,
        short_shared=10**5,
    )
    data = encode_schedule(record)
    assert decode_schedule(data) == record
    assert len(data) <= MOST_BYTES <= 200


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1])])
def test_records_of_other_versions_are_none(data):
    assert decode_schedule(data) is None


def test_places_of_a_chat_and_its_next_turn():
    scheduler = make_scheduler(clock=Clock())
    first = make_request("a", range(10), max_tokens=7)
    (told,) = run(scheduler, first)
    assert (told.number, told.call, told.owner, told.shared) == (0, 0, -1, 0)
    assert (told.prompt, told.output, told.limit, told.flags) == (10, 7, 7, 0)
    assert told.end_call == 7
    (second,) = run(scheduler, make_request("b", [*first.token_ids, 1, 2, 3], max_tokens=1))
    assert (second.number, second.owner, second.shared) == (1, 0, 4)
    (third,) = run(scheduler, make_request("c", [*range(8), 99, 98, 97, 96, 95], max_tokens=1))
    assert (third.owner, third.shared) == (0, 2)


def test_other_namespaces_share_nothing():
    scheduler = make_scheduler(clock=Clock())
    run(scheduler, make_request("a", range(10)))
    (told,) = run(scheduler, make_request("b", range(10), namespace="salt"))
    assert (told.owner, told.shared) == (-1, 0)


def test_ends_from_outside_are_told():
    scheduler = make_scheduler(clock=Clock())
    scheduler.add(make_request("a", 10))
    step(scheduler)
    scheduler.abort("a")
    (told,) = scheduler.ledger.take().values()
    assert told.schedule.flags == ABORTED


def test_memory_is_bounded_and_beginnings_are_kept_longest():
    owners = BlockOwners(10)
    chain = [b"chain%03d" % place for place in range(8)]
    assert owners.link(0, chain) == (-1, 0)
    assert owners.link(1, [b"other%03d" % place for place in range(4)]) == (-1, 0)
    assert owners.link(2, chain) == (0, 6), "the last two were forgotten"


def test_a_sequence_that_outgrows_the_short_factors_has_two_links():
    scheduler = make_scheduler(clock=Clock(), short_context=12)
    run(scheduler, make_request("a", range(10), max_tokens=1))
    run(scheduler, make_request("b", range(16), max_tokens=1))
    (told,) = run(scheduler, make_request("c", range(10), max_tokens=9))
    assert (told.flags, told.facts.short_context) == (LENGTHENED, 12)
    assert (told.short_owner, told.short_shared) == (0, 2)
    assert (told.owner, told.shared) == (1, 2)


def test_texts_and_hashes_are_not_in_a_record():
    scheduler = make_scheduler(clock=Clock())
    request = make_request("secret-request", range(100, 140), tenant="secret-key", namespace="secret-salt")
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    (told,) = scheduler.ledger.take().values()
    data = encode_schedule(told.schedule)
    assert b"secret" not in data
    assert not any(block[:4] in data for block in request.block_hashes)


def drafted_rows(seed, count):
    draw, rows = random.Random(seed), []
    for _ in range(count):
        drafted = draw.choice([1, 3, 7, 7, MOST_DRAFTED, draw.randrange(1, MOST_DRAFTED + 1)])
        gap = draw.choice([0, 0, 0, 1, 2, 19, 20, 21, 40, draw.randrange(300)])
        rows.append(DraftedRow(gap, drafted, drafted if draw.random() < 0.6 else draw.randrange(drafted + 1)))
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_rows_with_drafts_are_found_again_as_far_as_they_had_room(seed):
    rows = drafted_rows(seed, seed * 2)
    data, is_whole = encode_drafts(rows, 1000)
    assert is_whole
    assert decode_drafts(data) == rows
    for room in (0, 1, 7, 60):
        short, is_whole = encode_drafts(rows, room)
        found = decode_drafts(short)
        assert len(short) <= room
        assert found == rows[: len(found)]
        assert is_whole == (found == rows)


def test_an_answer_of_some_hundred_rows_with_drafts_has_room():
    draw = random.Random(1)
    rows = [
        DraftedRow(draw.choice([0, 0, 1, 3]), 7, 7 if draw.random() < 0.7 else draw.randrange(8))
        for _ in range(150)
    ]
    assert encode_drafts(rows, 90)[1]


@pytest.mark.parametrize("data", [b"\x00", b"\xff" * 9, bytes(60)])
def test_other_bytes_are_no_rows_or_some(data):
    with suppress(ValueError):
        assert all(row.accepted <= row.drafted <= MOST_DRAFTED for row in decode_drafts(data))


def test_a_record_s_room_is_what_is_left_of_its_bytes():
    assert MOST_DRAFTS <= MOST_DRAFTED
    scheduler = make_scheduler(clock=Clock())
    (told,) = run(scheduler, make_request("a", range(10), max_tokens=7))
    assert 60 < told.room <= MOST_BYTES - len(encode_schedule(told))
    full = told._replace(drafts=bytes(told.room))
    assert MOST_BYTES - 8 < len(encode_schedule(full)) <= MOST_BYTES
