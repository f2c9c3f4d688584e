"""The daemon's life as a user of the command line meets it, with the fake engine behind it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.admin_client import ApiRefusal
from llmbox.app.errors import CliError, Exit
from support.cli_box import PATIENCE, Box, box, interrupt, is_alive, until
from support.fake_engine import GO_FILE

__all__ = ["box"]


def test_up_is_idempotent_and_down_leaves_nothing(box: Box):
    model = box.model()
    first = box.run("up", model, PYTHONNODEBUGRANGES="1")  # started by interpreters of their own
    assert first.code == 0, first.err
    assert "http://127.0.0.1:" in first.out
    assert "curl " in first.out
    assert "Authorization" not in first.out, "no key is needed"
    assert f"llmbox --data-dir {box.paths.data_dir} top" in first.out, "the printed commands lead elsewhere"
    assert "Starting the daemon" in first.err
    second = box.run("up", model, "--json")
    assert second.code == 0
    assert second.json["schema"] == "llmbox.up/1"
    assert second.json["started"] is False
    assert second.json["models"] == [{"name": "tiny", "state": "ready", "context": 4096}]
    with urllib.request.urlopen(second.json["url"].replace("/v1", "/health"), timeout=PATIENCE) as answer:
        assert json.load(answer) == {"status": "ok"}
    running = box.running
    assert running is not None
    until(lambda: len(engine_pids(running.pid)) == 1)  # one more may be on its way out
    engine = engine_pids(running.pid)
    assert box.run("down").code == 0
    assert not is_alive(running.pid)
    assert not any(map(is_alive, engine))
    assert sorted(item.name for item in box.paths.runtime_dir.iterdir()) == ["llmbox.lock"]
    for folder in (box.paths.state_dir, box.paths.runtime_dir):
        assert all(item.stat().st_mode & 0o077 == 0 for item in folder.iterdir())


def test_up_opens_the_panel_in_the_users_browser(box: Box, tmp_path: Path):
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$@" > {opened}\n')
    browser.chmod(0o755)
    done = box.run("up", "--no-wait", "--open", BROWSER=str(browser))
    assert done.code == 0
    until(opened.exists)
    assert opened.read_text().strip() in done.out
    assert "/admin/signin?token=" in opened.read_text()


def test_other_flags_on_a_running_daemon_are_told_with_exit_9(box: Box):
    model = box.model()
    assert box.run("up", model, "--ctx", "512").code == 0
    same = box.run("up", model, "--ctx", "512", "--json")
    assert same.json["models"][0]["context"] == 512
    other_model = box.run("up", model, "--ctx", "256")
    assert other_model.code == Exit.CONFLICT
    assert "--ctx: runs with 512, asked for 256" in other_model.err
    other_port = box.run("up", "--port", "7499")
    assert other_port.code == Exit.CONFLICT
    assert "server.port: runs with 0, asked for 7499" in other_port.err


def test_up_with_a_second_model_loads_it(box: Box):
    assert box.run("up", box.model("one")).code == 0
    both = box.run("up", box.model("two"), "--alias", "zwei", "--json")
    assert [model["name"] for model in both.json["models"]] == ["zwei"]
    assert box.run("ps", "-q").out.split() == ["one", "zwei"]
    assert box.run("unload", "one").code == 0
    assert box.run("ps", "-q").out.split() == ["zwei"]
    assert box.run("unload", "one").code == Exit.NOT_FOUND
    assert box.run("load", box.model("one"), "--no-wait").code == 0
    assert box.run("unload", "--all").code == 0
    assert json.loads(box.run("ps", "--json").out) == {"schema": "llmbox.ps/1", "models": []}


def test_a_second_daemon_is_refused_with_pid_and_port(box: Box):
    box.serve(box.model())
    running = box.running
    assert running is not None
    second = box.run("serve", box.model())
    assert second.code == Exit.CONFLICT
    assert f"pid {running.pid}, port {running.port}" in second.err


def test_two_at_once_leave_one(box: Box):
    model = box.model()
    starts = [box.spawn("up", model, "--json") for _ in range(3)]
    ends = [(start.communicate(timeout=300), start.returncode) for start in starts]
    assert [code for _, code in ends] == [0, 0, 0], ends
    assert len({json.loads(out)["pid"] for (out, _), _ in ends}) == 1
    assert sum(json.loads(out)["started"] for (out, _), _ in ends) == 1


def test_a_port_in_use_is_exit_9_and_says_who(box: Box):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for command in ("serve", "up"):
            result = box.run(command, box.model(), "--port", port)
            assert result.code == Exit.CONFLICT
            assert f"127.0.0.1:{port} is in use" in result.err
            assert f"pid {os.getpid()} " in result.err
    assert box.running is None


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"load_error": ("bad_model", "model.safetensors is cut")}, Exit.FAILED, "model.safetensors is cut"),
        ({"load_error": ("does_not_fit", "needs 9 GB, has 1 GB")}, Exit.DOES_NOT_FIT, "needs 9 GB, has 1 GB"),
        ({"load_crash": True}, Exit.FAILED, "told to crash while loading"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_ends_the_start_with_its_reason(
    box: Box, options: dict, code: Exit, words: str
):
    model = box.model(**options)
    foreground = box.run("serve", model)
    assert foreground.code == code
    assert words in foreground.err
    background = box.run("up", model)
    assert background.code == code
    assert words in background.err
    assert str(box.paths.log_file) in background.err
    until(lambda: box.running is None)


def test_a_later_model_that_fails_leaves_the_daemon_alone(box: Box):
    assert box.run("up", box.model("good")).code == 0
    bad = box.model("bad", load_error=("does_not_fit", "needs 9 GB"))
    result = box.run("load", bad)
    assert result.code == Exit.DOES_NOT_FIT
    assert "needs 9 GB" in result.err
    states = {model["name"]: model["state"] for model in box.run("ps", "--json").json["models"]}
    assert states == {"good": "ready", "bad": "failed"}
    assert box.run("unload", "bad").code == 0
    assert box.run("status", "--json").json["ready"] is True


def test_the_api_answers_while_the_model_loads(box: Box):
    box.spawn("serve", box.model(load_delay=120))
    until(lambda: box.running is not None)
    status = box.run("status", "--json").json
    assert status["ready"] is False
    assert "loading" in status["cause"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{status['url']}/ready", timeout=PATIENCE)
    assert caught.value.code == 503
    waited = box.run("up", box.folder / "models" / "tiny", "--timeout", "0.2")
    assert waited.code == Exit.FAILED
    assert "not ready yet" in waited.err
    assert box.run("down", "--now").code == 0


def test_killed_daemons_leave_no_engine_and_the_next_start_is_clean(box: Box):
    model = box.model()
    child = box.serve(model)
    engines = engine_pids(child.pid)
    child.kill()
    child.wait()
    until(lambda: not any(map(is_alive, engines)))
    assert box.run("status").code == Exit.UNREACHABLE
    assert box.run("up", model).code == 0
    assert f"an earlier daemon (pid {child.pid}) ended without cleaning up" in box.run("logs").out


def test_sigterm_lets_open_requests_finish(box: Box):
    model = box.model(hold_at=5, script=[72, 73] * 2048)
    child = box.serve(model)
    asking = box.spawn("run", "tiny", "hello", "--max-tokens", "60")
    until(lambda: box.api("status")["open_requests"] == 1)
    child.send_signal(signal.SIGTERM)
    until(lambda: is_draining(box))
    (model / GO_FILE).touch()
    out, err = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == 0, err
    assert len(out.strip()) == 60
    assert child.wait(timeout=PATIENCE) == 0


def test_a_second_sigterm_stops_at_once_and_says_so_to_clients(box: Box):
    child = box.serve(box.model(hold_at=5, script=[72, 73] * 2048))
    asking = box.spawn("run", "tiny", "hello", "--max-tokens", "4000")
    until(lambda: box.api("status")["open_requests"] == 1)
    child.send_signal(signal.SIGTERM)
    until(lambda: is_draining(box))  # two signals at once are one
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=PATIENCE) == 0
    _, err = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == Exit.FAILED
    assert "shutting down" in err


def test_sighup_reloads_or_keeps_the_old_settings(box: Box):
    child = box.serve(box.model())
    box.paths.config_file.write_text('[log]\nlevel = "debug"\n[limits]\nqueue = 7\n')
    child.send_signal(signal.SIGHUP)
    until(lambda: box.api("status")["pending_restart"] == ["limits.queue"])
    assert box.api("config")["settings"]["log.level"]["value"] == "debug"
    box.paths.config_file.write_text("[server]\nprot = 1\n")
    child.send_signal(signal.SIGHUP)
    until(lambda: "configuration not reloaded" in box.run("logs").out)
    assert "did you mean server.port?" in box.run("logs").out
    assert box.api("config")["settings"]["log.level"]["value"] == "debug"
    assert child.poll() is None


def test_restart_keeps_flags_and_models(box: Box):
    assert box.run("up", box.model(), "--ctx", "512", "--alias", "other").code == 0
    told = box.run("config", "set", "model.ctx", "600").err
    assert "started with --ctx, which overrides the file" in told
    assert "llmbox restart" in box.run("config", "set", "limits.queue", "7").err
    before = box.running
    assert box.run("restart").code == 0
    after = box.running
    assert before is not None
    assert after is not None
    assert before.pid != after.pid
    (model,) = box.run("ps", "--json").json["models"]
    assert (model["name"], model["info"]["context_window"]) == ("other", 512)


def test_restart_brings_back_what_was_loaded_later(box: Box):
    assert box.run("up", box.model("first")).code == 0
    assert box.run("load", box.model("second"), "--ctx", "256", "--ttl", "900", "--alias", "named").code == 0
    assert box.run("load", "builtin", "--alias", "guide").code == 0
    assert box.run("load", "builtin", "--alias", "helper").code == 0
    assert box.run("load", box.model("third")).code == 0
    assert box.run("pin", "builtin").code == 0
    assert box.run("unload", "first").code == 0

    def facts() -> dict[str, tuple[Any, ...]]:
        return {
            row["name"]: (row["options"]["ctx"], row["ttl_s"], row["pinned"], row["aliases"])
            for row in box.api("models")["models"]
        }

    before = facts()
    assert before["named"] == (256, 900, False, [])
    assert before["builtin"] == (None, None, True, ["guide", "helper"])
    for _ in range(2):
        done = box.run("restart")
        assert done.code == 0, done.err
        assert facts() == before


def test_up_with_other_model_flags_is_told_too(box: Box):
    assert box.run("up", box.model(), "--ctx", "512").code == 0
    assert box.run("up", "--ctx", "512").code == 0
    done = box.run("up", "--ctx", "256", "--dtype", "float32")
    assert done.code == Exit.CONFLICT
    assert "model.ctx: runs with 512, asked for 256" in done.err
    assert "model.dtype: runs with auto, asked for float32" in done.err


def test_an_idle_daemon_uses_no_processor_time(box: Box):
    child = box.serve(box.model())
    assert box.run("requests").code == 0  # opens the request log, which else comes seconds after the start
    until(lambda: is_quiet(child.pid, seconds=2))  # the start's last imports come behind the first answers


def test_systemd_is_told(box: Box, tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        child = box.spawn("serve", box.model(), NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(1000).startswith(b"READY=1")
        until(box.paths.sign_in_file.exists)
        link = box.paths.sign_in_file.read_text().strip()
        assert box.paths.sign_in_file.stat().st_mode & 0o777 == 0o600
        with urllib.request.urlopen(link, timeout=PATIENCE) as page:
            assert page.status == 200
        child.terminate()
        assert manager.recv(1000) == b"STOPPING=1"
    printed, _ = child.communicate(timeout=PATIENCE)
    assert link.partition("token=")[2] not in printed  # the journal has other readers
    assert str(box.paths.sign_in_file) in printed
    assert not box.paths.sign_in_file.exists()


def test_processes_can_be_read_in_ps(box: Box):
    child = box.serve(box.model())
    wanted = {b"llmbox: daemon", b"llmbox: engine tiny"}
    until(lambda: {title(pid) for pid in [child.pid, *engine_pids(child.pid)]} == wanted)  # no spare any more


def test_the_request_log_is_shown_followed_and_filtered(box: Box):
    box.serve(box.model(script=[72, 73] * 2048))
    for _ in range(2):
        assert box.run("run", "tiny", "hello", "--max-tokens", "6").out == "ijijij\n"
    until(lambda: len(box.api("requests")["requests"]) == 2)
    row = box.run("requests", "--json").json["requests"][0]
    assert (row["model"], row["http_status"], row["output_tokens"]) == ("tiny", 200, 6)
    assert box.run("requests", "show", row["id"], "--json").json["request"]["id"] == row["id"]
    assert box.run("requests", "show", "absent").code == Exit.NOT_FOUND
    assert box.run("requests", "--model", "other", "-q").out == ""
    assert len(box.run("requests", "-q", "--since", "1h", "--limit", "1").out.split()) == 1
    following = box.spawn("requests", "-f", "-q")
    assert following.stdout is not None
    assert following.stdout.readline() != ""
    interrupt(following)
    following.communicate(timeout=PATIENCE)
    assert following.returncode == 130
    stats = box.run("stats", "--json").json
    assert stats["total"]["output_tokens"] == 12


def test_a_running_request_can_be_cancelled(box: Box):
    box.serve(box.model(hold_at=5, script=[72, 73] * 2048))
    asking = box.spawn("run", "tiny", "hello", "--max-tokens", "4000")
    until(lambda: box.api("requests")["in_flight"])
    (live,) = box.run("requests", "--json").json["in_flight"]
    assert box.run("requests", "cancel", live["id"]).code == 0
    _, err = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == Exit.FAILED
    assert "cancelled" in err
    assert box.run("requests", "cancel", live["id"]).code == Exit.NOT_FOUND


def test_a_closed_pipe_is_no_error(box: Box):
    box.serve(box.model())
    shell = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -1', "-", *box.command("logs")],
        capture_output=True,
        text=True,
        env=box.environ,
        check=False,
        timeout=300,
    )
    assert shell.returncode == 0
    assert shell.stderr == ""


def shell(box: Box, redirection: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "-", *box.command(*arguments)],
        capture_output=True,
        text=True,
        env=box.environ,
        check=False,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-"])
def test_closed_standard_streams_are_no_error(box: Box, redirection: str):
    """As cron and some supervisors start programs."""
    done = shell(box, redirection, "ls")
    assert (done.returncode, done.stderr) == (0, "")
    assert shell(box, redirection, "run", "builtin", "hi", "--max-tokens", "0").returncode == Exit.USAGE


def test_a_full_disk_under_stdout_is_told(box: Box):
    done = shell(box, ">/dev/full", "ls")
    assert done.returncode == Exit.FAILED
    assert "stdout cannot be written" in done.stderr
    assert "ignored" not in done.stderr, "Python complains at the end"


def test_the_admin_api_is_closed_on_tcp(box: Box):
    box.serve(box.model())
    running = box.running
    assert running is not None
    for path in ("status", "models", "requests", "stats", "config", "events"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{running.url}/admin/api/{path}", timeout=PATIENCE)
        assert caught.value.code == 401


def test_events_tell_of_models_and_can_be_replayed(box: Box):
    box.serve(box.model())
    client = box.client
    with client.stream("GET", "/admin/api/events") as stream:
        client.post("/admin/api/models/unload", {"model": "tiny"})
        kind, data = next(event for event in stream.events() if event[0] != "tick")
    assert (kind, json.loads(data)["model"]) == ("model.stopped", "tiny")
    with client.stream("GET", "/admin/api/events", headers={"Last-Event-ID": "0"}) as stream:
        events = stream.events()
        assert [next(events)[0] for _ in range(3)] == ["model.loading", "model.ready", "model.stopped"]
    with pytest.raises(ApiRefusal, match="must be a number"):
        client.stream("GET", "/admin/api/events", headers={"Last-Event-ID": "x"})


def test_watching_and_following_until_interrupted(box: Box):
    box.serve(box.model())
    commands = (["stats", "--watch", "--interval", "0.1"], ["logs", "-f", "-n", "1"])
    for command in commands:
        child = box.spawn(*command)
        assert child.stdout is not None
        assert child.stdout.readline() != ""
        if command[0] == "logs":
            box.run("unload", "tiny")
        assert child.stdout.readline() != ""
        interrupt(child)
        _, err = child.communicate(timeout=PATIENCE)
        assert (child.returncode, err.strip()) == (130, "")


def test_wrong_admin_requests_get_named_errors(box: Box):
    box.serve(box.model())
    client = box.client
    wrong = (
        ({"model": "org/absent"}, 404, "not on this disk"),
        ({"model": "../x/y/z"}, 404, "does not exist"),
        ({"model": str(box.folder / "models" / "tiny"), "options": {"ctx": -1}}, 400, "between 16"),
        ({"model": str(box.folder / "models" / "tiny"), "options": {"ctxx": 1}}, 400, "model.ctx"),
        ({"model": str(box.folder / "models" / "tiny"), "alias": "a b"}, 400, "cannot be a model's name"),
        ({"model": str(box.folder / "models" / "tiny"), "options": {"ctx": 100}}, 409, "other settings"),
        ({"model": 1}, 400, "model"),
        ({}, 400, "model"),
    )
    for body, status, words in wrong:
        with pytest.raises(ApiRefusal, match=words) as caught:
            client.post("/admin/api/models/load", body)
        assert caught.value.status == status, body
    assert box.api("status")["ready"] is True


def is_draining(box: Box) -> bool:
    """A connection that has asked nothing yet when the drain begins is closed: then ask again."""
    try:
        return bool(box.api("status")["draining"])
    except CliError:
        return False


def engine_pids(daemon: int) -> list[int]:
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    return [int(pid) for pid in children if b"engine" in title(int(pid))]


def title(pid: int) -> bytes:
    """Nothing for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return b""


def is_quiet(pid: int, seconds: float) -> bool:
    before = processor_ticks(pid)
    time.sleep(seconds)
    return processor_ticks(pid) - before <= max(1, seconds)  # hundredths of a second


def processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
