"""The daemon's times around the engine's: no gap, no overlap, whatever ended the sequence."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from llmbox.app.engines.request_journal import RequestJournal, TokenStream
from llmbox.app.gateway.request_times import ExchangeClock, call_after_times, sequence_records
from llmbox.app.inspect.why import split
from llmbox.app.store.record import decode_sequence, encode_sequence
from llmbox.engine.ipc.messages import AddRequest, RequestOutput
from llmbox.engine.ipc.sequence_times import MOST_BYTES, PhaseTimes, SequenceTimes
from llmbox.engine.sampling_params import SamplingParams

HOUR = 3600.0
TIMES = SequenceTimes(
    arrived_at=2.25,
    ended_at=7.0,
    queued=0.75,
    prefill=PhaseTimes(own=1.0, decoding=0.5, steps=2, others=4),
    decode=PhaseTimes(own=1.0, prompts=0.5, between=1.0, steps=10, mixed=1),
)


def message(name="r.1"):
    return AddRequest(request_id=name, prompt_ids=[1, 2, 3], params=SamplingParams(max_tokens=4))


def stream(**changes):
    made = TokenStream(message(), lambda _: None)
    values = {"added_at": 2.0, "sent_at": 2.125, "received_at": 7.25, "times": TIMES} | changes
    for name, value in values.items():
        setattr(made, name, value)
    return made


def records(*streams, ended=8.0, stalls=()):
    clock = ExchangeClock(began=1.0, arrived=1.25, model_s=0.5)
    clock.stalls.extend(stalls)
    request = SimpleNamespace(
        generation=SimpleNamespace(clock=clock),
        usage=SimpleNamespace(cached_tokens=0),
        sequences=[SimpleNamespace(stream=each) for each in streams],
    )
    return [decode_sequence(data) for data in sequence_records(request, ended)]


def seconds(record):
    return {row.name: row.seconds for row in split(record)}


def test_all_rows_of_a_request():
    (record,) = records(stream())
    assert seconds(record) == {
        "reading": 0.25,
        "model": 0.5,
        "prompt": 0.25,
        "gateway": 0.125,
        "sending": 0.125,
        "queued": 0.75,
        "prefill_own": 1.0,
        "prefill_shared": 0.5,
        "decode_own": 1.0,
        "decode_prompts": 0.5,
        "between": 1.0,
        "delivery": 1.0,
    }
    assert record.total == 7_000_000
    notes = {row.name: row.note for row in split(record)}
    assert notes["prefill_own"] == "3 tokens in 2 chunks"
    assert notes["prefill_shared"] == "2.0 other sequences in a step"
    assert notes["decode_prompts"] == "in 1 of 10 steps"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sent_at": None, "times": None}, {"gateway": 6.0}),  # no engine was ready
        ({"times": None}, {"unsplit": 5.125, "delivery": 0.75}),  # its engine told nothing
        ({"sent_at": 2.225, "lost_s": 0.1}, {"gateway": 0.125, "lost": 0.1, "sending": 0.025}),
        ({"received_at": None}, {"delivery": 1.0}),
    ],
)
def test_rows_add_up_whatever_happened(changes, part):
    (record,) = records(stream(**changes))
    rows = seconds(record)
    assert "other" not in rows
    assert sum(rows.values()) == pytest.approx(7.0, abs=1e-5)
    assert {name: rows[name] for name in part} == part


def test_only_stalls_after_the_last_token_are_the_clients():
    (record,) = records(stream(), stalls=[(6.0, 2.0), (7.25, 0.5), (7.75, 0.25)])
    assert (record.client, record.delivery) == (500_000, 500_000)


def test_an_abort_that_the_engine_heard_later():
    (record,) = records(stream(received_at=4.0), ended=4.0)
    rows = seconds(record)
    assert sum(rows.values()) == pytest.approx(3.0, abs=1e-5)
    assert "delivery" not in rows
    (early,) = records(stream(received_at=2.2), ended=2.2)
    assert seconds(early)["sending"] == pytest.approx(0.075)
    assert early.queued == 0


def test_the_sequence_that_ended_last_comes_last():
    first, last = records(stream(), stream(received_at=5.0, times=None))
    assert (first.total, last.total) == (4_000_000, 7_000_000)


def test_a_record_is_at_most_200_bytes():
    names = ("own", "decoding", "prompts", "absent", "between")
    phase = PhaseTimes(**dict.fromkeys(names, HOUR / 15), steps=9_000_000, mixed=90_000, others=9_000_000)
    times = SequenceTimes(
        arrived_at=0, ended_at=HOUR, queued=HOUR / 9, prefill=phase, recompute=phase, decode=phase
    )
    (record,) = records(
        stream(times=times, sent_at=-9.0, lost_s=70.0), ended=HOUR + 9, stalls=[(HOUR + 8, 3.0)]
    )
    assert len(encode_sequence(record)) <= 200
    told = replace(record, schedule=b"x" * MOST_BYTES)
    assert len(encode_sequence(told)) <= 200 + MOST_BYTES + 2
    assert decode_sequence(encode_sequence(told)) == told
    assert decode_sequence(b"\xc1") is None


def journal():
    return RequestJournal(sent.append, on_empty=lambda: None, on_finish=lambda: None)


sent: list[object] = []


@pytest.mark.parametrize("end", ["told", "told nothing", "died", "unloaded"])
async def test_times_of_a_cancelled_request_follow(end):
    box = journal()
    opened = box.add(message(), hand_over=True)
    opened.cancel()
    calls = []
    assert call_after_times([opened], lambda: calls.append(opened.times))
    assert calls == []
    if end == "told":
        box.note_times("r.1", TIMES)
    elif end == "died":
        box.engine_died(from_outside=True)
    elif end == "unloaded":
        box.fail_all("model_unloaded", "")
    box.deliver(RequestOutput(request_id="r.1", finish_reason="abort"))
    assert calls == [TIMES if end == "told" else None]
    assert not call_after_times([opened], calls.clear)


async def test_time_with_an_engine_that_died_is_lost():
    box = journal()
    opened = box.add(message(), hand_over=True)
    first = opened.sent_at
    box.engine_died(from_outside=True)
    box.engine_ready()
    assert opened.lost_s == opened.sent_at - first > 0
