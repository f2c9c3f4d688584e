"""Traces of requests from the header to the collector, over the real server."""

import json
from dataclasses import replace

import httpx
import pytest

from llmbox.app.config.settings import Settings, TelemetrySettings
from support.cli_box import PATIENCE, until
from support.openai_server import serving
from support.otlp_collector import attributes, collecting

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def settings(url, **options):
    return replace(Settings(), telemetry=TelemetrySettings(otlp_endpoint=url, **options))


def start(folder, server):
    server.load_scripted(folder, {"plain": "an answer"}, "")


def ask(server, header=None, **body):
    sent = {"model": "plain", "messages": [{"role": "user", "content": "secret-prompt"}], **body}
    headers = {} if header is None else {"traceparent": header}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=sent, headers=headers, timeout=PATIENCE)


def trace_of(server, request_id):
    """The trace in the row of a request, which is written by the time its sequences' times can be read."""
    server.call(server.services.request_log.get_times(request_id))
    return server.call(server.services.request_log.get(request_id)).trace_id


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    with collecting() as collector, serving(folder / "data", settings=settings(collector.url)) as server:
        start(folder, server)
        yield server, collector


def spans_of(collector, trace_id, count):
    def found():
        return [span for span in collector.spans if span["traceId"] == trace_id]

    until(lambda: len(found()) >= count)
    return found()


def test_a_request_with_a_trace(traced):
    server, collector = traced
    answer = ask(server, f"00-{TRACE}-{PARENT}-01").json()
    spans = spans_of(collector, TRACE, 4)
    (whole,) = [span for span in spans if span["kind"] == 2]
    assert whole["parentSpanId"] == PARENT
    told = attributes(whole)
    assert told["gen_ai.response.id"] == answer["id"]
    assert told["gen_ai.usage.output_tokens"] == str(answer["usage"]["completion_tokens"])
    assert told["server.port"] == server.url.rpartition(":")[2]
    phases = [span for span in spans if span is not whole]
    assert {"tokenize", "engine", "delivery"} <= {span["name"] for span in phases}
    assert {span["parentSpanId"] for span in phases} == {whole["spanId"]}
    assert int(whole["startTimeUnixNano"]) <= min(int(span["startTimeUnixNano"]) for span in phases) + 10**6
    assert trace_of(server, answer["id"]) == TRACE
    sent = json.dumps(collector.requests)
    assert "secret-prompt" not in sent
    assert "an answer" not in sent


def test_a_request_without_begins_a_trace(traced):
    server, collector = traced
    name = ask(server).json()["id"]
    trace_id = trace_of(server, name)
    (whole,) = [span for span in spans_of(collector, trace_id, 4) if span["kind"] == 2]
    assert "parentSpanId" not in whole


def test_a_caller_that_does_not_sample(traced):
    server, collector = traced
    unsampled = "a" * 32
    name = ask(server, f"00-{unsampled}-{PARENT}-00").json()["id"]
    assert trace_of(server, name) == unsampled
    later = ask(server).json()["id"]
    spans_of(collector, trace_of(server, later), 4)
    assert not [span for span in collector.spans if span["traceId"] == unsampled]


def test_a_refused_request_has_a_span(traced):
    server, collector = traced
    refused = "b" * 32
    answer = ask(server, f"00-{refused}-{PARENT}-01", model="nobody")
    assert answer.status_code == 404
    (span,) = spans_of(collector, refused, 1)
    told = attributes(span)
    assert (told["error.type"], told["http.response.status_code"]) == ("model_not_found", "404")


def test_metrics_count_spans(traced):
    server, _ = traced
    ask(server)
    until(lambda: "llmbox_trace_spans_exported_total" in httpx.get(f"{server.url}/metrics").text)
    text = httpx.get(f"{server.url}/metrics").text
    assert "llmbox_trace_spans_dropped_total 0.0" in text


def test_off_by_default_and_spans_end_with_the_server(tmp_path):
    with collecting() as collector:
        with serving(tmp_path / "off") as server:
            start(tmp_path / "a", server)
            answer = ask(server, f"00-{TRACE}-{PARENT}-01").json()
            assert trace_of(server, answer["id"]) == TRACE, "the caller's trace is told all the same"
        assert not collector.requests
        with serving(tmp_path / "on", settings=settings(collector.url)) as server:
            start(tmp_path / "b", server)
            ask(server, f"00-{TRACE}-{PARENT}-01")
        assert len(collector.spans) >= 4, "the end of serving sends what waited"


def test_nothing_is_drawn_where_no_request_is_sampled(tmp_path):
    with (
        collecting() as collector,
        serving(tmp_path / "data", settings=settings(collector.url, trace_share=0.0)) as server,
    ):
        start(tmp_path / "a", server)
        name = ask(server).json()["id"]
        assert trace_of(server, name) == ""
    assert not collector.requests
