"""Spans reach a collector in batches; a collector that is dead, slow or refuses costs spans alone."""

import socket
import threading

import pytest

from llmbox.app.errors import CliError
from llmbox.app.tracing.otlp_exporter import BATCH_SPANS, OtlpExporter, read_headers
from support.otlp_collector import collecting


def exporter(url, headers=None, **options):
    return OtlpExporter(url, headers or {}, "box", **{"delay": 0.0, "first_wait": 0.001, **options})


def spans(count, start=0):
    return [b'{"name":"%d"}' % number for number in range(start, start + count)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_batch_as_a_collector_reads_it():
    with collecting() as collector:
        made = exporter(collector.url + "/base/", {"Authorization": "Bearer x"})
        made.put(spans(3))
        made.close(30)
    ((path, headers, body),) = collector.requests
    assert path == "/base/v1/traces"
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer x"
    resource = body["resourceSpans"][0]["resource"]["attributes"]
    assert {"key": "service.name", "value": {"stringValue": "box"}} in resource
    assert body["resourceSpans"][0]["scopeSpans"][0]["scope"]["name"] == "llmbox"
    assert [span["name"] for span in collector.spans] == ["0", "1", "2"]
    assert (made.exported, made.dropped) == (3, 0)


def test_an_endpoint_that_names_the_path_keeps_it():
    with collecting() as collector:
        made = exporter(collector.url + "/v1/traces")
        made.put(spans(1))
        made.close(30)
    assert [path for path, _, _ in collector.requests] == ["/v1/traces"]


def test_many_spans_take_several_requests():
    with collecting() as collector:
        made = exporter(collector.url)
        made.put(spans(BATCH_SPANS + 10))
        made.close(30)
    assert len(collector.requests) == 2
    assert len(collector.spans) == made.exported == BATCH_SPANS + 10


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_collector_gets_the_batch_again(status):
    with collecting([status, status]) as collector:
        made = exporter(collector.url)
        made.put(spans(1))
        for _ in range(3):
            assert collector.arrived.acquire(timeout=60)
        made.close(30)
    assert [span["name"] for span in collector.spans] == ["0", "0", "0"]
    assert (made.exported, made.dropped) == (1, 0)


@pytest.mark.parametrize("status", [302, 400, 401, 500])
def test_what_a_collector_refuses_is_lost_and_counted(status):
    with collecting([status]) as collector:
        made = exporter(collector.url)
        made.put(spans(2))
        assert collector.arrived.acquire(timeout=60)
        made.put(spans(1, start=2))
        made.close(30)
    assert [span["name"] for span in collector.spans] == ["0", "1", "2"]
    assert (made.exported, made.dropped) == (1, 2)


def test_spans_that_a_collector_rejects_are_counted():
    with collecting(answer=b'{"partialSuccess":{"rejectedSpans":"2"}}') as collector:
        made = exporter(collector.url)
        made.put(spans(5))
        made.close(30)
    assert (made.exported, made.dropped) == (3, 2)


def test_a_dead_collector_loses_spans_alone(caplog):
    made = exporter(f"http://127.0.0.1:{free_port()}", {"Authorization": "Bearer secret"}, queue_spans=100)
    made.put(spans(250))
    assert made.dropped >= 150
    made.close(30)
    assert (made.exported, made.dropped) == (0, 250)
    assert "does not take spans" in caplog.text
    assert "secret" not in caplog.text


def test_a_collector_that_does_not_answer_blocks_nobody():
    with collecting() as collector:
        collector.gate.clear()
        made = exporter(collector.url, queue_spans=10)
        made.put(spans(1))
        assert collector.arrived.acquire(timeout=60)
        made.put(spans(25))
        assert made.dropped == 15
        made.close(0.05)
        assert made.dropped == 25, "the end does not wait for the collector"


def test_a_collector_that_comes_back_gets_later_spans():
    with collecting([500]) as collector:
        made = exporter(collector.url)
        made.put(spans(1))
        assert collector.arrived.acquire(timeout=60)
        made.put(spans(1, start=1))
        assert collector.arrived.acquire(timeout=60)
        made.close(30)
    assert (made.exported, made.dropped) == (1, 1)


def test_nothing_runs_before_the_first_span():
    before = threading.active_count()
    made = exporter("http://127.0.0.1:1")
    made.close()
    made.put(spans(1))
    assert threading.active_count() == before
    assert made.dropped == 1


def test_headers_of_a_file(tmp_path):
    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer a:b=c\n\nX-Scope-OrgID: box\n")
    file.chmod(0o600)
    assert read_headers(str(file), {"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}) == {
        "Authorization": "Bearer a:b=c",
        "X-Scope-OrgID": "box",
    }


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("A: b", 0o640, "other users may read it"),
        ("two words: b", 0o600, "is not a header"),
        ("Host: elsewhere", 0o600, "is not a header"),
        ("A: b\x07", 0o600, "is not a header"),
    ],
)
def test_headers_that_are_refused(tmp_path, text, mode, why):
    file = tmp_path / "headers"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(CliError) as refused:
        read_headers(str(file), {})
    assert why in refused.value.why


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CliError) as refused:
        read_headers(str(tmp_path / "none"), {})
    assert "No such file" in refused.value.why


def test_headers_of_the_environment():
    environ = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, x=y"}
    assert read_headers("", environ) == {"api-key": "a b", "x": "y"}
    assert read_headers("", {**environ, "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "z=1"}) == {"z": "1"}
    assert read_headers("", {}) == {}
