"""A forked command is a process like one that was started: its code, streams and signals are its own."""

import os
import signal
from pathlib import Path

import pytest

from llmbox.app.errors import Exit
from support.cli_box import PATIENCE, Box, box
from support.fork_server import ForkedProcess, needs_interpreter

__all__ = ["box"]

pytestmark = pytest.mark.process


def test_codes_streams_and_environment_are_its_own(box: Box):
    assert isinstance(box.spawn("version"), ForkedProcess)
    assert box.run("version").out.startswith("llmbox")
    refused = box.run("ls", "--nothing")
    assert (refused.code, refused.out) == (Exit.USAGE, "")
    assert "--nothing" in refused.err
    assert box.run("config", "get", "server.port", LLMBOX_SERVER_PORT="4321").out == "4321\n"
    assert box.run("config", "get", "server.port").out == "0\n"


def test_a_signal_ends_it_and_is_told(box: Box):
    child = box.spawn("serve", "builtin")
    child.send_signal(signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL
    assert child.poll() == -signal.SIGKILL
    child.kill()  # gone: nobody else gets the signal
    assert child.pid != os.getpid()


def test_a_daemon_that_a_command_starts_has_a_session_files_and_folder_of_its_own(box: Box):
    starter = box.spawn("up")
    assert starter.wait(PATIENCE) == 0
    assert box.running is not None
    pid, process = box.running.pid, Path(f"/proc/{box.running.pid}")
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert process.joinpath("cwd").readlink() == Path("/")
    files = [process.joinpath("fd", str(number)).readlink() for number in range(3)]
    assert files == [Path(os.devnull), box.paths.log_file, box.paths.log_file]


@pytest.mark.parametrize("name", ["PYTHONUTF8", "LC_ALL", "TZ"])
def test_what_interpreters_read_at_their_start_needs_one(name: str):
    assert not needs_interpreter(os.environ)
    assert needs_interpreter({**os.environ, name: "another"})
