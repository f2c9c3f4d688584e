"""Where the time of requests went, of a real engine: what the client measured, without a rest."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from llmbox.app.config.settings import Settings, TelemetrySettings
from llmbox.app.inspect.why import request_time
from llmbox.app.store.database_file import read_schedules
from llmbox.engine.core.replay.schedule_replay import WhatIf
from llmbox.engine.ipc.sequence_times import decode_schedule
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.process.replay_job import replay_records
from support.cli_box import PATIENCE, until
from support.openai_server import serving
from support.otlp_collector import collecting
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("why")
    model = make_tiny_model(folder / "model", arch="llama")
    with collecting() as collector:
        traces = TelemetrySettings(otlp_endpoint=collector.url)
        settings = replace(Settings(), telemetry=traces)
        with serving(folder / "data", Launch(), settings=settings) as server:
            server.load(model, "tiny", device="cpu", threads=1, memory_bytes=256 << 20)
            server.collector, server.model = collector, model
            yield server


def ask(server, words=8, headers=None, **options):
    """The answer's id and the seconds that it took."""
    body = {"model": "tiny", "prompt": "fox " * words, "max_tokens": 32, "ignore_eos": True, **options}
    began = time.monotonic()
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=PATIENCE).json()
    return answer["id"], time.monotonic() - began


def why(server, request_id):
    return server.call(request_time(server.services, request_id))


def assert_adds_up(told):
    rows = [row.seconds for row in told.rows if row.name != "other"]
    assert sum(rows) == pytest.approx(told.total_s, rel=0.02)
    assert min(rows) >= 0


def test_requests_that_shared_steps(server):
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, server, words) for words in (8, 16, 32, 64)]
        answers = [each.result() for each in asked]
    for request_id, measured in answers:
        told = why(server, request_id)
        names = {row.name for row in told.rows}
        assert {"sending", "queued", "prefill_own", "decode_own", "between", "delivery"} <= names
        assert "unsplit" not in names
        assert told.total_s <= measured
        assert_adds_up(told)


def test_choices_are_sequences_of_one_request(server):
    request_id, _ = ask(server, n=3)
    told = why(server, request_id)
    assert told.sequences == 3
    assert_adds_up(told)


def test_its_phases_are_spans(server):
    trace_id = "c" * 32
    request_id, _ = ask(server, headers={"traceparent": f"00-{trace_id}-{'d' * 16}-01"})
    told = why(server, request_id)
    assert told.trace_id == trace_id

    def found():
        return {span["name"]: span for span in server.collector.spans if span["traceId"] == trace_id}

    until(lambda: "text_completion tiny" in found() and "delivery" in found())
    spans = found()
    assert {"prefill", "decode"} <= spans.keys()
    whole = spans.pop("text_completion tiny")
    nanos = sum(int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) for span in spans.values())
    assert nanos == pytest.approx(1e9 * told.total_s, rel=0.02)
    assert {span["parentSpanId"] for span in spans.values()} == {whole["spanId"]}


def test_the_steps_of_all_requests_are_replayed(server):
    server.load(server.model, "plain", device="cpu", threads=1, memory_bytes=256 << 20, speculate="off")
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, server, words, model="plain") for words in (8, 16, 32, 64, 16, 8)]
        assert all(each.result() for each in asked)
    log = server.services.request_log
    server.call(log.get_times("none"))
    encoded, models = read_schedules(log.path, 0.0, time.time(), "plain")
    report = replay_records([decode_schedule(each) for each in encoded], WhatIf(), lambda _: None)
    (run,) = report.runs
    assert models == {run.run: ["plain"]}
    assert (run.missing, run.begun_before, run.inexact) == (0, 0, {})
    assert run.recorded.requests == run.ends == run.same_ends == 6
    assert run.recorded.prefix_hits > 0
    assert run.recorded.output_tokens == 6 * 32


def test_a_client_that_left(server):
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data: "))
    request_id = first.split('"id":"')[1].split('"')[0]
    until(lambda: server.call(server.services.request_log.get_times(request_id)))
    told = why(server, request_id)
    names = {row.name for row in told.rows}
    assert "prefill_own" in names
    assert "unsplit" not in names, "the engine told its times after the abort"
    assert_adds_up(told)
