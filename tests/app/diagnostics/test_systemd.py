"""The systemd unit, and the commands around it with a systemctl that only takes notes."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmbox.app.config.settings import schema
from llmbox.app.diagnostics.systemd import UnitSpec, quote_argument, unit_text
from llmbox.app.errors import Exit
from support.cli_call import Call, call, home

__all__ = ["call", "home"]

SPEC = UnitSpec(system=True, command=["/usr/bin/python3", "-P", "-m", "llmbox"], drain=30)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that systemd runs; the result is the file with what systemctl was told."""
    notes = tmp_path / "notes"
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {notes}\n'
        'case "$*" in *show*) printf "ActiveState=active\\nUnitFileState=enabled\\nMainPID=42\\n'
        'StatusText=Serving on x\\n";; esac\n'
    )
    tool.chmod(0o755)
    (tmp_path / "booted").mkdir()
    monkeypatch.setattr("llmbox.app.diagnostics.systemd.BOOTED", tmp_path / "booted")
    notes.touch()
    return notes


def path_of(systemd: Path) -> str:
    return f"{systemd.parent / 'bin'}:{os.environ['PATH']}"


def test_install_status_and_uninstall_for_a_user(call: Call, home: Path, systemd: Path):
    environ = {"PATH": path_of(systemd)}
    assert call("service", "install", "--user", **environ).code == 0
    file = home / ".config" / "systemd" / "user" / "llmbox.service"
    text = file.read_text()
    assert "Type=notify" in text
    assert re.search(r"ExecStart=\S+ -P -m llmbox --data-dir \S+/data serve\n", text)
    assert systemd.read_text().splitlines() == [
        "--user --no-pager daemon-reload",
        "--user --no-pager enable --now llmbox.service",
    ]
    status = call("service", "status", "--user", "--json", **environ)
    told = json.loads(status.out)
    assert status.code == 0
    assert told["schema"] == "llmbox.service/1"
    assert (told["active"], told["enabled"], told["pid"]) == ("active", "enabled", 42)
    assert call("service", "uninstall", "--user", **environ).code == 0
    assert not file.exists()
    assert "disable --now" in systemd.read_text()
    assert call("service", "uninstall", "--user", **environ).code == Exit.NOT_FOUND


def test_a_systemctl_that_fails_tells_why(call: Call, home: Path, systemd: Path):
    (systemd.parent / "bin" / "systemctl").write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    done = call("service", "install", "--user", PATH=path_of(systemd))
    assert done.code == Exit.FAILED
    assert "no bus" in done.err


def test_machines_without_systemd_say_so(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmbox.app.diagnostics.systemd.BOOTED", tmp_path / "absent")
    status = call("service", "status", "--user")
    assert status.code == Exit.UNREACHABLE
    assert "this machine does not run systemd" in status.out
    install = call("service", "install", "--user")
    assert install.code == Exit.FAILED
    assert "llmbox serve" in install.err


def test_print_changes_nothing(call: Call, home: Path):
    done = call("service", "install", "--user", "--print")
    assert done.code == 0
    assert "[Service]" in done.out
    assert not list(home.iterdir())


def test_the_machines_service_keeps_its_files_in_one_place(call: Call):
    assert call("service", "install", "--system", "--print").code == Exit.USAGE


def test_no_setting_is_in_the_unit():
    text = unit_text(SPEC)
    assert "Environment" not in text
    exec_start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    names = [name.partition(".")[2] for name in schema()]
    assert not [name for name in names if f"--{name.replace('_', '-')} " in exec_start]


def test_words_of_the_command_stand_for_themselves():
    assert quote_argument("/a b/50%/$x") == '"/a b/50%%/$$x"'
    assert quote_argument("/plain") == "/plain"


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt install systemd"
)


def analyze(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, words)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not re.search(r"(?i)unknown|failed to parse|ignoring", done.stderr), done.stderr
    return done


@needs_systemd
@pytest.mark.parametrize("system", [True, False], ids=["system", "user"])
def test_systemd_takes_the_unit(tmp_path: Path, system: bool):
    file = tmp_path / "llmbox.service"
    file.write_text(unit_text(replace(SPEC, system=system, command=[sys.executable, "-m", "llmbox"])))
    scope = "--system" if system else "--user"
    done = analyze("verify", scope, "--man=no", file, XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize(("system", "most"), [(True, 2.0), (False, 6.3)], ids=["system", "user"])
def test_systemd_finds_the_unit_hardened(tmp_path: Path, system: bool, most: float):
    file = tmp_path / "llmbox.service"
    file.write_text(unit_text(replace(SPEC, system=system)))
    scope = "--system" if system else "--user"
    limit = f"--threshold={round(10 * most)}"
    done = analyze(scope, "security", "--offline=true", limit, file, XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
