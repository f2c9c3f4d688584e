"""An engine killed five times in a minute under a real daemon: everybody can tell, and it comes back."""

import os
import signal
import socket

import httpx
import psutil

from llmbox.app.errors import Exit
from support.cli_box import PATIENCE, Box, box, until

__all__ = ["box"]

FIELDS = {"model": "tiny", "prompt": "x", "max_tokens": 2}


def the_model(box: Box) -> dict:
    (model,) = box.api("models")["models"]
    return model


def engine_pids(box: Box) -> list[int]:
    children = psutil.Process(box.running.pid).children()
    return [child.pid for child in children if _title(child).startswith("llmbox: engine tiny")]


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.NoSuchProcess:
        return ""


def kill_five_times(box: Box) -> None:
    for deaths in range(5):
        until(lambda: the_model(box)["state"] == "ready" and engine_pids(box))
        os.kill(engine_pids(box)[0], signal.SIGKILL)
        until(lambda seen=deaths: the_model(box)["restarts"] > seen)


def test_a_model_that_was_given_up_is_seen_everywhere_and_a_load_starts_it(box: Box):
    path = box.folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(PATIENCE)
        environ = {"LLMBOX_SERVER_RESTART_COOLDOWN": "7200", "LLMBOX_SERVER_RESTART_COOLDOWN_MAX": "7200"}
        box.serve(box.model(), NOTIFY_SOCKET=str(path), **environ)
        assert box.run("status").code == Exit.OK
        kill_five_times(box)
        until(lambda: the_model(box)["state"] == "failed")
        while "tiny failed" not in (line := receiver.recv(4096).decode()):
            assert line.startswith(("READY=1", "STATUS=Serving on"))
        assert "5 times in 60 s" in line
        assert 7000 < the_model(box)["retry_s"] <= 7200

        status = box.run("status")
        assert status.code == Exit.FAILED
        assert "it is started again in" in status.out
        assert "llmbox load tiny" in status.out
        assert box.run("status", "-q").code == Exit.FAILED
        up = box.run("up")
        assert up.code == Exit.FAILED
        assert "5 times in 60 s" in up.err
        with httpx.Client(base_url=box.running.url, timeout=PATIENCE) as http:
            ready = http.get("/ready")
            assert ready.status_code == 503
            assert "it is started again in" in ready.json()["cause"]
            answer = http.post("/v1/completions", json=FIELDS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
            assert 7000 < int(answer.headers["Retry-After"]) <= 7200

            assert box.run("load", box.folder / "models" / "tiny").code == Exit.OK
            assert http.post("/v1/completions", json=FIELDS).status_code == 200
        assert box.run("status").code == Exit.OK


def test_it_comes_back_by_itself(box: Box):
    box.serve(box.model(), LLMBOX_SERVER_RESTART_COOLDOWN="0.1")
    kill_five_times(box)
    until(lambda: the_model(box)["state"] == "ready")
    with httpx.Client(base_url=box.running.url, timeout=PATIENCE) as http:
        assert http.post("/v1/completions", json=FIELDS).status_code == 200
