"""Telemetry of a real daemon: ticks over the event stream, history, log lines, and nothing while idle."""

import json
import os
import signal
import time

import psutil
import pytest

from llmbox.app.admin_client import ApiRefusal, Client
from support.cli_box import PATIENCE, Box, box, interrupt, until

__all__ = ["box"]


def whole_second(client: Client) -> dict | None:
    """Return recent telemetry once one request ran through all of its newest second, else None.

    A second's value is the mean of its samples: the second in which the request began has less than 1.
    """
    chart = client.get("/admin/api/telemetry?series=running,cpu&step=1")
    return chart if chart["series"]["running"][-1] == 1 else None


def test_ticks_history_log_and_findings_of_a_daemon(box: Box):
    box.serve(box.model(step_delay=0.1, script=[72, 73] * 2048))
    client = box.client
    asking = box.spawn("run", "tiny", "hello", "--max-tokens", "4000")
    until(lambda: box.api("requests")["in_flight"])
    with client.stream("GET", "/admin/api/events", headers={"Last-Event-ID": "0"}) as stream:
        seen = {}
        for kind, data in stream.events():
            seen.setdefault(kind, json.loads(data))
            if kind == "tick" and json.loads(data)["totals"]["tokens_out"] not in {"n/a", 0}:
                tick = json.loads(data)
                break
    assert {"model.ready", "request.started", "tick"} <= seen.keys()
    (engine,) = tick["engines"]
    assert (engine["model"], engine["state"], engine["running"]) == ("tiny", "ready", 1)
    assert [request["state"] for request in tick["requests"]] == ["decode"]
    assert {process["role"] for process in tick["host"]["processes"]} == {"daemon", "engine tiny"}
    assert 0 < tick["host"]["memory_available"] <= tick["host"]["memory_total"]
    charts = []
    until(lambda: charts.append(whole_second(client)) or charts[-1])
    chart = charts[-1]
    assert len(chart["times"]) == len(chart["series"]["cpu"])
    assert any("is ready" in line["message"] for line in client.get("/admin/api/logs?lines=50")["lines"])
    findings = client.get("/admin/api/doctor")["findings"]
    assert {"python", "daemon"} <= {finding["name"] for finding in findings}
    assert client.get("/admin/api/bench") == {"runs": []}
    assert client.post("/admin/api/profile", {"model": "tiny", "is_on": True})["engine"]["is_on"]
    found = client.post("/admin/api/profile", {"model": "tiny", "is_on": False})
    assert found["engine"]["seconds"] >= sum(found["engine"]["spans"].values()) > 0
    assert found["daemon"]["threads"]["event loop"] > 0
    (blocks,) = client.get("/admin/api/blocks?cells=10")["models"]
    (request,) = tick["requests"]
    assert blocks["owners"] == [request["id"]]
    assert blocks["cells"][0][1] >= 1  # live blocks of the first cell
    assert sum(run[0] for run in blocks["cells"]) == 10
    assert [mark["kind"] for mark in client.get("/admin/api/marks")["marks"]] == ["load"]
    interrupt(asking)
    asking.communicate(timeout=PATIENCE)


def test_evictions_refusals_and_restarts_leave_marks(box: Box):
    daemon = box.serve(box.model())
    client = box.client
    (engine,) = client.get("/admin/api/tick")["engines"]
    os.kill(engine["pid"], signal.SIGKILL)
    until(lambda: box.api("models")["models"][0]["restarts"] == 1 and box.is_ready())
    kinds = [mark["kind"] for mark in client.get("/admin/api/marks")["marks"]]
    assert kinds == ["load", "restart", "load"]
    daemon.send_signal(signal.SIGTERM)
    daemon.communicate(timeout=PATIENCE)
    box.serve(box.model())
    assert len(box.client.get("/admin/api/marks")["marks"]) == 4


def test_what_is_on_disk_and_whether_it_fits(box: Box):
    box.serve(box.model())
    client = box.client
    (builtin,) = (model for model in client.get("/admin/api/disk")["models"] if model["ref"] == "builtin")
    assert builtin["size"] > 1_000_000
    assert builtin["servable"] is True
    fit = client.get("/admin/api/fit?model=builtin")
    assert fit["fits"] is True
    with pytest.raises(ApiRefusal) as refused:
        client.get("/admin/api/fit?model=no-such-model")
    assert refused.value.status == 404


def test_wrong_questions_get_named_errors(box: Box):
    box.serve(box.model())
    client = box.client
    for path, words in (
        ("telemetry?step=7", "1, 10, 60"),
        ("telemetry?since=-5", "since"),
        ("telemetry?since=nan", "since"),
        ("marks?limit=-1", "limit"),
        ("marks?limit=1000000000", "limit"),
        ("requests?limit=-1", "limit"),
        ("requests?limit=1000000000", "limit"),
        ("requests?before=-1", "before"),
        ("requests?status=7", "status"),
        ("requests?since=inf", "since"),
        ("blocks?cells=0", "cells"),
        ("logs?lines=0", "lines"),
        ("search?text=x&limit=0", "limit"),
        ("requests?modle=x", "'modle'.*It takes before, errors, key, limit, model, since, status"),
        ("requests?request=x", "'request'"),
        ("models?x=1", "'x'.*It takes none"),
        ("telemetry?series=cpu,gpu0.color", "gpu0.color"),
        ("logs?level=loud", "debug, info"),
    ):
        with pytest.raises(ApiRefusal, match=words):
            client.get(f"/admin/api/{path}")


def test_a_daemon_that_nobody_watches_is_idle(box: Box):
    box.serve(box.model())
    assert box.run("requests").code == 0  # opens the request log, which else comes seconds after the start
    daemon = psutil.Process(box.running.pid)

    def is_idle() -> bool:
        before = sum(daemon.cpu_times()[:2])
        time.sleep(3.0)
        return sum(daemon.cpu_times()[:2]) - before < 0.1

    until(is_idle)  # the last work of the start comes behind the first answers
