"""Spans of a request and its phases: names, times without gap, and no content."""

import json
from dataclasses import replace

from llmbox.app.store.record import PhaseRecord, RequestRecord, SequenceRecord
from llmbox.app.tracing.tracer import TraceContext, phase_spans, request_span
from support.otlp_collector import attributes

TRACE = TraceContext(
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    span_id="00f067aa0ba902b7",
    parent_id="1111111111111111",
    is_sampled=True,
    address="127.0.0.1",
    port=7411,
)
RECORD = RequestRecord(
    id="chatcmpl-1",
    created=1.0,
    model="tiny",
    endpoint="/v1/chat/completions",
    http_status=200,
    key="laptop",
    stream=True,
    finish_reasons="stop,length",
    prompt_tokens=10,
    cached_tokens=4,
    output_tokens=6,
    n=2,
    seed=7,
    params='{"temperature":0.5,"max_tokens":6,"stop":1}',
    fingerprint="fp_1",
)
TIMES = SequenceRecord(
    total=100_000,
    reading=1000,
    model=0,
    prompt=2000,
    gateway=3000,
    sending=4000,
    queued=5000,
    prefill=PhaseRecord(own=6000, decoding=1000, steps=2),
    recompute=PhaseRecord(own=2000),
    preempted=3000,
    decode=PhaseRecord(own=40_000, between=20_000, steps=6),
    delivery=10_000,
    client=3000,
    preemptions=1,
)


def span_of(record=RECORD):
    return json.loads(request_span(record, TRACE, 1_000, 5_000))


def test_a_request():
    span = span_of()
    assert span["traceId"] == TRACE.trace_id
    assert span["spanId"] == TRACE.span_id
    assert span["parentSpanId"] == TRACE.parent_id
    assert (span["name"], span["kind"]) == ("chat tiny", 2)
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("1000", "5000")
    assert "status" not in span
    told = attributes(span)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.request.temperature"] == 0.5
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == ("10", "6")
    assert [each["stringValue"] for each in told["gen_ai.response.finish_reasons"]["values"]] == [
        "stop",
        "length",
    ]
    assert (told["server.address"], told["server.port"]) == ("127.0.0.1", "7411")
    assert "error.type" not in told
    assert "laptop" not in json.dumps(span), "a key's name stays here"


def test_errors():
    failed = span_of(replace(RECORD, http_status=503, error_code="engine_failed"))
    assert attributes(failed)["error.type"] == "engine_failed"
    assert failed["status"]["code"] == 2
    refused = span_of(replace(RECORD, http_status=400, error_code="", fingerprint=""))
    assert attributes(refused)["error.type"] == "400"
    assert "status" not in refused, "the caller's error is none of the server's"
    assert "gen_ai.usage.input_tokens" not in attributes(refused)


def test_operations():
    names = {
        path: attributes(span_of(replace(RECORD, endpoint=path)))["gen_ai.operation.name"]
        for path in ("/v1/completions", "/v1/messages", "/v1/embeddings", "/api/embed", "/v1/rerank")
    }
    assert list(names.values()) == ["text_completion", "chat", "embeddings", "embeddings", "rerank"]


def test_phases_follow_each_other_and_fill_the_request():
    spans = [json.loads(each) for each in phase_spans(TIMES, TRACE, 1_000_000)]
    names = [span["name"] for span in spans]
    assert names == ["read", "tokenize", "queue", "prefill", "decode", "delivery"]
    assert {span["parentSpanId"] for span in spans} == {TRACE.span_id}
    assert len({span["spanId"] for span in spans}) == len(spans)
    starts = [int(span["startTimeUnixNano"]) for span in spans]
    ends = [int(span["endTimeUnixNano"]) for span in spans]
    assert starts == [1_000_000, *ends[:-1]]
    assert ends[-1] - starts[0] == 1000 * TIMES.total
    assert attributes(spans[4])["llmbox.preemptions"] == "1"


def test_a_root_has_no_parent():
    assert "parentSpanId" not in json.loads(request_span(RECORD, replace(TRACE, parent_id=""), 0, 1))
