"""The header of W3C is taken exactly as the standard has it, or not at all."""

import pytest

from llmbox.app.tracing.tracer import RequestTracer, draw_span_id, draw_trace_id, parse_traceparent

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"00-{TRACE}-{PARENT}-02", False),
        (f"cc-{TRACE}-{PARENT}-01", True),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-holds", True),
    ],
)
def test_valid(header, sampled):
    assert parse_traceparent([header]) == (TRACE, PARENT, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        GOOD + "-more",
        GOOD + " ",
        " " + GOOD,
        GOOD + "\n",
        GOOD.upper(),
        f"ff-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01x",
        f"0-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-0g",
        f"00_{TRACE}_{PARENT}_01",
        f"00-{'٣' * 32}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01-" + "x" * 600,
    ],
)
def test_invalid_is_ignored(header):
    assert parse_traceparent([header]) is None


def test_two_headers_are_none():
    assert parse_traceparent([GOOD, GOOD]) is None
    assert parse_traceparent([]) is None


def test_ids_are_never_zero(monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    assert draw_span_id() == "0" * 15 + "1"
    monkeypatch.setattr("secrets.randbelow", lambda most: most - 1)
    assert draw_trace_id() == "f" * 32


def test_without_a_collector_a_caller_s_trace_is_known_and_nothing_is_sampled():
    tracer = RequestTracer()
    trace = tracer.begin([GOOD])
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, PARENT, False)
    assert tracer.begin([]) is None
    assert tracer.counts == (0, 0)
