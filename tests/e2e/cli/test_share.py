"""`llmbox share`: what it prints, what it changes, and that its undo leaves nothing."""

import itertools
import json
import signal
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import segno

from llmbox.app.cli.root import INTERRUPTED, run
from llmbox.app.cli.server import daemon_starter, share
from llmbox.app.cli.server.share import NetworkAddress, certificate_fingerprint, lan_addresses, qr_text
from llmbox.app.config.loader import read_file
from llmbox.app.daemon.network import self_made_certificate
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.instance import find_running
from llmbox.app.lifecycle.program import Program
from support.cli_box import box  # noqa: F401 - a fixture

HERE = [NetworkAddress("127.0.0.1", "lo")]


@pytest.fixture
def llmbox(box, monkeypatch, capsys):  # noqa: F811
    """Commands in this process, for which the loopback address stands for the network's."""
    monkeypatch.setattr(share, "lan_addresses", lambda: HERE)

    def call(*arguments):
        program = Program(command=box.command()[:3])
        code = run(["--data-dir", str(box.paths.data_dir), *map(str, arguments)], program)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    for name in ("HF_HOME", "LLMBOX_SERVER_PORT"):  # a daemon inherits the environment of this process
        monkeypatch.setenv(name, box.environ[name])
    return call


def status_of(url, certificate, key=""):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    trust = ssl.create_default_context(cafile=certificate)
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), context=trust, timeout=60
        ) as page:
            return page.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_daemon_is_shared_and_no_longer(llmbox, box):  # noqa: F811
    box.paths.data_dir.mkdir(mode=0o700)
    box.paths.config_file.write_text("# mine\n[server]\nmdns = false\n")
    assert llmbox("up", box.model(), "--host", "127.0.0.1")[0] == 0
    first = box.running

    code, out, err = llmbox("share", "--yes", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert box.running.host == "0.0.0.0"
    assert [model["state"] for model in box.api("models")["models"]] == ["ready"]  # it was in memory before
    assert told["urls"] == [f"https://127.0.0.1:{box.running.port}/v1"]
    assert told["sign_in"].startswith(f"https://127.0.0.1:{box.running.port}/admin/signin?token=")
    assert told["certificate_sha256"] == certificate_fingerprint(Path(told["certificate"]))
    assert status_of(f"{told['urls'][0]}/models", told["certificate"], told["secret"]) == 200
    assert status_of(f"{told['urls'][0]}/models", told["certificate"], "sk-llmbox-wrong") == 401
    assert status_of(told["sign_in"], told["certificate"]) == 200
    secrets = [told["secret"], told["sign_in"].partition("token=")[2]]
    kept = [file for file in box.paths.data_dir.rglob("*") if file.is_file()]
    assert kept
    for file, secret in itertools.product(kept, secrets):
        assert secret.encode() not in file.read_bytes(), file

    code, out, _ = llmbox(
        "share", "--yes", "--no-tls"
    )  # once more: the key is there, what was before is kept
    assert code == 0
    assert "lan, which exists" in out
    assert f"http://127.0.0.1:{box.running.port}/v1" in out
    assert "SSL_CERT_FILE" not in out
    assert "token=" not in out  # it would cross the network in the clear
    assert "share with HTTPS" in out
    assert "Undo: llmbox --data-dir" in out

    code, _, err = llmbox("share", "--off", "--yes")
    assert (code, "Revoked: lan" in err) == (0, True)
    assert (box.running.host, box.running.certificate) == (first.host, "")
    assert box.paths.config_file.read_text() == "# mine\n[server]\nmdns = false\n"
    assert box.api("keys")["keys"] == []
    assert llmbox("share", "--off", "--yes")[0] == Exit.NOT_FOUND


def test_the_undo_revokes_before_it_restarts_and_erases_as_key_rm_does(llmbox, box, monkeypatch):  # noqa: F811
    assert llmbox("share", "--yes")[0] == 0
    (key,) = box.api("keys")["keys"]
    events = []

    def restart(*_, **__):
        events.append(("restart", box.api("keys")["keys"]))
        raise CliError("it does not start", "a test", "none")

    with monkeypatch.context() as patched:
        patched.setattr(share, "restart_daemon", restart)
        patched.setattr(share, "forget_stored", lambda _: events.append(("forget", None)))
        patched.setattr(
            "llmbox.app.control.kv_cache.purge_key", lambda *given: events.append(("purge", given[2]))
        )
        assert llmbox("share", "--off", "--yes")[0] == Exit.FAILED
    assert events == [("purge", key["id"]), ("forget", None), ("restart", [])]
    assert llmbox("share", "--off", "--yes")[0] == 0  # once more, to the end


def test_a_start_that_fails_leaves_the_settings_as_they_were(llmbox, box, monkeypatch):  # noqa: F811
    with socket.create_server(("0.0.0.0", 0)) as taken:
        monkeypatch.setenv("LLMBOX_SERVER_PORT", str(taken.getsockname()[1]))
        code, _, err = llmbox("share", "--yes")
    assert code == Exit.CONFLICT
    assert "is in use" in err
    assert "The settings are as before" in err
    assert read_file(box.paths.config_file) == {}
    assert json.loads(llmbox("key", "ls", "--json")[1])["keys"] == []
    assert not box.paths.share_file.exists()


def test_a_restart_that_does_not_come_about_leaves_nothing(llmbox, box, monkeypatch):  # noqa: F811
    assert llmbox("up", "--host", "127.0.0.1")[0] == 0

    def restart(*_, **__):
        raise CliError("no permission to stop it", "a test", "none")

    with monkeypatch.context() as patched:
        patched.setattr(share, "restart_daemon", restart)
        assert llmbox("share", "--yes")[0] == Exit.FAILED
        assert (box.api("keys")["keys"], box.paths.share_file.exists()) == ([], False)
        assert read_file(box.paths.config_file) == {}
    assert llmbox("share", "--yes")[0] == 0
    monkeypatch.setattr(share, "restart_daemon", restart)
    before = box.paths.share_file.read_bytes()
    assert llmbox("share", "--yes", "--no-tls", "--key", "second")[0] == Exit.FAILED
    assert [key["name"] for key in box.api("keys")["keys"]] == ["lan"]
    assert box.paths.share_file.read_bytes() == before
    assert read_file(box.paths.config_file)["server.tls"][0] is True


def test_a_daemon_that_runs_although_a_model_failed_is_shared_and_its_key_shown(llmbox, box, monkeypatch):  # noqa: F811
    real = share.restart_daemon

    def restart(*given, **named):
        real(*given, **named)
        raise CliError("broken cannot be loaded", "a test", "none")

    monkeypatch.setattr(share, "restart_daemon", restart)
    code, out, err = llmbox("share", "--yes")
    assert (code, "broken cannot be loaded" in err) == (Exit.FAILED, True)
    assert "llmbox is shared on your network" in out
    secret = out.partition("Key     ")[2].split()[0]
    certificate = box.paths.tls_dir / "certificate.pem"
    assert status_of(f"https://127.0.0.1:{box.running.port}/v1/models", certificate, secret) == 200
    assert "The settings are as before" not in err


def test_ctrl_c_before_the_new_daemon_is_up_leaves_nothing(llmbox, box, monkeypatch):  # noqa: F811
    assert llmbox("up", "--host", "127.0.0.1")[0] == 0
    begun = []

    def interrupted(_, process, __):
        begun.append(process)
        signal.raise_signal(signal.SIGINT)

    def find(paths):
        if begun:  # a second Ctrl-C before the undo has begun
            signal.raise_signal(signal.SIGINT)
        return find_running(paths)

    monkeypatch.setattr(share, "find_running", find)
    monkeypatch.setattr(daemon_starter, "_wait_for_api", interrupted)
    code, out, err = llmbox("share", "--yes")
    assert code == INTERRUPTED
    assert "The settings are as before. If the daemon has stopped, start it with llmbox up." in err
    assert out == ""
    assert [process.returncode for process in begun] != [None]  # no shared daemon comes up later
    assert find_running(box.paths) is None
    assert read_file(box.paths.config_file) == {}
    assert not box.paths.share_file.exists()
    assert json.loads(llmbox("key", "ls", "--json")[1])["keys"] == []


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "told"),
    [
        (["--address", "198.51.100.9"], {}, Exit.USAGE, "not a network address of this machine"),
        (["--yes"], {"LLMBOX_SERVER_HOST": "127.0.0.1"}, Exit.CONFLICT, "LLMBOX_SERVER_HOST sets it"),
        (["--yes", "--key", "no good"], {}, Exit.USAGE, "at most 64 letters"),
        ([], {}, Exit.USAGE, "confirm with --yes"),
        (["--off"], {}, Exit.NOT_FOUND, "not shared"),
    ],
)
def test_what_cannot_be_is_said_before_anything_changes(
    llmbox,
    box,  # noqa: F811
    monkeypatch,
    arguments,
    environ,
    code,
    told,
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    was, _, err = llmbox("share", *arguments)
    assert (was, told in err) == (code, True), err
    assert not box.paths.config_file.exists()
    assert not box.paths.keys_file.exists()


def test_without_a_network_there_is_nothing_to_share(llmbox, monkeypatch):
    monkeypatch.setattr(share, "lan_addresses", list)
    assert "connect it to a network" in llmbox("share", "--yes")[2]


def test_the_announcement_needs_its_package(llmbox, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, err = llmbox("share", "--yes", "--mdns")
    assert (code, "it needs the package zeroconf" in err) == (Exit.FAILED, True)


def test_in_the_clear_there_is_no_sign_in_link_and_no_code(llmbox, box, monkeypatch):  # noqa: F811
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "no sign-in link" in llmbox("share", "--help")[1]
    code, out, err = llmbox("share", "--no-tls", "--yes", "--json")
    assert (code, json.loads(out)["sign_in"]) == (0, None), err
    assert "▀" not in llmbox("share", "--no-tls", "--yes")[1]


def test_addresses_are_no_loopback():
    assert not any(each.address.startswith(("127.", "169.254.")) for each in lan_addresses())


def test_the_code_that_is_drawn_is_that_of_the_link():
    link = "https://192.0.2.7:7411/admin/signin?token=" + "Ab-9_" * 8
    lines = [
        line.removeprefix("  \x1b[30;107m").removesuffix("\x1b[0m") for line in qr_text(link).split("\n")
    ]
    upper, lower = {" ": 0, "▀": 1, "▄": 0, "█": 1}, {" ": 0, "▀": 0, "▄": 1, "█": 1}
    rows = [[half[block] for block in line] for line in lines for half in (upper, lower)]
    code = [list(row) for row in segno.make(link, micro=False, error="l").matrix_iter(border=4)]
    assert rows[: len(code)] == code
    assert not any(map(any, rows[len(code) :]))


def test_a_fingerprint_is_that_of_browsers(tmp_path):
    certificate, _ = self_made_certificate(tmp_path, ["localhost"])
    shown = certificate_fingerprint(certificate)
    assert len(shown.split(":")) == 32
    assert shown == shown.upper()
