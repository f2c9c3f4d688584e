"""`llmbox bench --find` over a server that is made up."""

import json

import pytest

from llmbox.app.bench.client import RequestTiming
from llmbox.app.bench.measure import LoadPoint
from llmbox.app.cli.admin import bench_find
from llmbox.app.errors import Exit
from support.cli_call import FakeClient, call, home

__all__ = ["call", "home"]

DAEMON = FakeClient(
    {
        "/admin/api/status": {"url": "http://127.0.0.1:1"},
        "/admin/api/models": {"models": [{"name": "org/one", "aliases": ["first"]}]},
    }
)


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Each stream takes 10 ms a token more than the one before."""

    async def complete(server, prompt, most):
        return RequestTiming(started=1.0, ended=2.0)

    async def measure_point(server, prompts, spec, streams, seconds, spread):
        assert spread == 1.0
        ttft, tpot = 0.1 * streams, 0.01 * streams
        missed = [
            name
            for name, value, most in (("ttft", ttft, spec.target.ttft), ("tpot", tpot, spec.target.tpot))
            if value > most
        ]
        return LoadPoint(streams, 20, 0, "", 2.0 * streams, 100.0 * streams, ttft, tpot, tuple(missed))

    monkeypatch.setattr(bench_find, "complete", complete)
    monkeypatch.setattr(bench_find, "measure_point", measure_point)


def find(call, *arguments, **environ):
    return call("bench", "first", "--find", *arguments, client=DAEMON, **environ)


def test_the_most_streams_within_the_targets(call):
    done = find(call, "--targets", "5000/65")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["STREAMS", "REQ/S", "OUT", "TOK/S", "TTFT", "P95", "TPOT", "P95", "ERRORS"]
    assert [row[0] for row in rows[1:7]] == ["1", "2", "4", "6", "7", "8"]
    assert rows[4][-1] == "within"
    assert done.out.splitlines()[5].endswith("TPOT missed")
    assert (
        "6 streams, 12.00 requests/s, are within 5000 ms to the first token and 65 ms a token for 95 %"
        in done.out
    )


def test_the_only_model_in_memory_is_measured_unless_another_is_named(call):
    found = call("bench", "--find", "--targets", "800/50", "--json", client=DAEMON)
    assert json.loads(found.out)["model"] == "org/one"
    idle = FakeClient({**DAEMON.answers, "/admin/api/models": {"models": []}})
    found = call("bench", "--find", "--targets", "800/50", "--json", client=idle)
    assert json.loads(found.out)["model"] == "builtin"


def test_as_json(call):
    done = find(call, "--targets", "350/1000", "--percentile", "99", "--json")
    told = json.loads(done.out)
    assert told["found"]["concurrency"] == 3
    assert told["percentile"] == 99
    assert [each["concurrency"] for each in told["points"]] == [1, 2, 4, 3]
    assert told["is_over"]


def test_the_models_own_targets_are_the_default(call):
    assert "no latency targets" in find(call).err
    done = find(call, LLMBOX_USAGE_TARGETS="org/*=5000/25")
    assert "2 streams" in done.out


def test_targets_that_no_load_meets(call):
    done = find(call, "--targets", "50/5", "--write")
    assert done.code == Exit.FAILED
    assert "no load of first is within 50 ms to the first token and 5 ms a token" in done.err
    assert "one stream alone takes 100.0 ms to the first token and 10.0 ms a token" in done.err
    assert "1" in done.out
    assert call("config", "get", "limits.admission").out == "queue\n"


def test_the_most_streams_are_said_to_be_a_bound(call):
    assert (
        "It may be more: more were not tried (--most)."
        in find(call, "--targets", "9999/999", "--most", 3).out
    )


def test_a_search_that_time_ended_writes_nothing(call, monkeypatch):
    """More streams than it found may be within the targets: max_running would keep them out."""

    async def out_of_time(server, prompts, spec, streams, seconds, spread):
        missed = ("time",) if streams == 4 else ()
        return LoadPoint(streams, 20, 0, "", 2.0, 100.0, 0.1, 0.01, missed)

    monkeypatch.setattr(bench_find, "measure_point", out_of_time)
    done = find(call, "--targets", "5000/500", "--time", 20, "--write")
    assert done.code == Exit.FAILED
    assert "2 streams, 2.00 requests/s, are within" in done.out
    assert "nothing was written: the time ran out before the search ended" in done.err
    assert "--time 40, or --most 2" in done.err
    assert call("config", "get", "model.overrides").out == "\n"
    assert find(call, "--targets", "5000/500", "--most", 2, "--write").code == 0
    assert call("config", "get", "model.overrides").out == "org/one:max_running=2\n"


def test_a_model_that_is_loading_is_waited_for_by_the_user(call, monkeypatch):
    async def loading(server, prompt, most):
        return RequestTiming(error='HTTP 503: {"error":{"code":"model_loading"}}')

    monkeypatch.setattr(bench_find, "complete", loading)
    assert "llmbox ps says when it is ready" in find(call, "--targets", "800/50").err


def test_what_was_found_is_written(call):
    assert call("config", "set", "usage.targets", "org/one=1/1,*=9/9").code == 0
    done = find(call, "--targets", "5000/35.5", "--write")
    assert done.code == 0, done.err
    assert call("config", "get", "limits.admission").out == "slo\n"
    assert call("config", "get", "model.overrides").out == "org/one:max_running=3\n"
    assert call("config", "get", "model.max_running").out == "auto\n", "other models have their own"
    assert call("config", "get", "usage.targets").out == "org/one=5000/35.5,*=9/9\n"
    assert "max_running holds for org/one alone" in done.err
    overrides = "org/one:max_running=9,org/*:ctx=4096,org/one:ctx=512"
    assert call("config", "set", "model.overrides", overrides).code == 0
    again = find(call, "--write")
    assert "usage.targets" not in again.err
    kept = "org/one:max_running=3,org/*:ctx=4096,org/one:ctx=512\n"
    assert call("config", "get", "model.overrides").out == kept


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--find", "--targets", "800"], "are not two times"),
        (["--find", "--targets", "a/b"], "are not two times"),
        (["--find", "--targets", "8/8", "--most", "0"], "must be above 0"),
        (["--find", "--targets", "8/8", "--write", "--url", "http://x"], "needs the local daemon"),
        (["--find", "--profile"], "--find searches by itself"),
        (["--write"], "need --find"),
    ],
)
def test_bad_input(call, arguments, text):
    done = call("bench", "first", *arguments, client=DAEMON)
    assert done.code != 0
    assert text in done.err
