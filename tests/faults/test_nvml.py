"""A GPU driver that misbehaves: telemetry says so, serving does not notice."""

import json

import pytest

from support.cli_box import Box, box

__all__ = ["box"]

HANG = 600
"""Seconds: more than `Box.run` waits for a command."""


def first_tick(box: Box, wanted) -> dict:
    with box.client.stream("GET", "/admin/api/events") as stream:
        for kind, data in stream.events():
            if kind == "tick" and wanted(tick := json.loads(data)):
                return tick
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("kind", ["hang", "lost", "errors"])
def test_serving_is_untouched(box: Box, kind):
    box.serve(box.model(script=[72, 73] * 2048), FAKE_NVML=kind)
    told = "problem" if kind == "hang" else "devices"  # a slow machine has a problem first
    tick = first_tick(box, lambda tick: tick["gpus"][told])
    if kind == "hang":
        assert "has not answered" in tick["gpus"]["problem"]
        later = first_tick(box, lambda now: now["time"] > tick["time"])
        assert later["time"] - tick["time"] < HANG, "a stuck driver delays one tick by its limit, no others"
    elif kind == "lost":
        lost, fine = tick["gpus"]["devices"]
        assert "lost" in lost["problem"].lower()
        assert fine["utilisation"] == 0.42
        assert tick["attention"][0]["level"] == "failure"
    else:
        assert tick["gpus"]["devices"][0]["power"] == "n/a"
        assert not [each for each in tick["attention"] if "GPU" in each["text"]]
    asked = box.run("run", "tiny", "hello", "--max-tokens", "8")
    assert asked.code == 0, asked.err
    assert box.api("status")["ready"]
    assert box.run("down").code == 0, "nothing waits for a stuck thread"


def test_a_line_a_second_for_scripts(box: Box):
    box.serve(box.model(), FAKE_NVML="fine")
    watching = box.spawn("stats", "--watch")
    assert watching.stdout is not None
    assert any("GPU0 42%" in line for line in watching.stdout)  # not yet in the first, on a slow machine
    watching.kill()
