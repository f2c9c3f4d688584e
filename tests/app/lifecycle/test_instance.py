import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmbox.app.config.paths import Paths, find_paths
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.instance import InstanceLock, RunningDaemon, find_running, is_locked, read_pid_file

HOLDER = """
import sys, time, fcntl, os
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = find_paths(tmp_path)
    found.create()
    return found


def running(pid: int = os.getpid()) -> RunningDaemon:
    return RunningDaemon(pid=pid, host="127.0.0.1", port=7411, socket="s", started_at=0.0, version="1")


def test_announced_while_it_holds_the_lock_and_gone_afterwards(paths: Paths):
    assert find_running(paths) is None
    with InstanceLock(paths) as lock:
        assert lock.leftover is None
        lock.announce(running())
        assert find_running(paths) == running()
        assert paths.pid_file.stat().st_mode & 0o077 == 0
    assert find_running(paths) is None
    assert not paths.pid_file.exists()


def test_a_second_one_is_refused_with_pid_and_port(paths: Paths):
    with InstanceLock(paths) as lock:
        lock.announce(running())
        with pytest.raises(CliError) as caught, InstanceLock(paths):
            pass
    assert caught.value.exit == Exit.CONFLICT
    assert f"pid {os.getpid()}, port 7411" in caught.value.why


def test_the_lock_of_a_killed_process_is_free_and_its_pid_file_a_leftover(paths: Paths):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(paths.lock_file)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_locked(paths.lock_file)
    paths.pid_file.write_text(json.dumps(vars_of(running(holder.pid))))
    holder.kill()
    holder.wait()
    assert not is_locked(paths.lock_file)
    paths.socket_file.touch()
    with InstanceLock(paths) as lock:
        assert lock.leftover is not None
        assert lock.leftover.pid == holder.pid
        assert not paths.socket_file.exists()
    holder.stdout.close()


def test_a_pid_file_alone_means_nothing(paths: Paths):
    paths.pid_file.write_text(json.dumps(vars_of(running(os.getpid()))))
    assert find_running(paths) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "null", '{"pid": 1, "unknown": 2}'])
def test_a_broken_pid_file_is_no_pid_file(paths: Paths, text: str):
    paths.pid_file.write_text(text)
    assert read_pid_file(paths) is None


def test_a_held_lock_without_pid_file_is_said(paths: Paths):
    with InstanceLock(paths), pytest.raises(CliError, match="starts or stops") as caught:
        find_running(paths, patience=0.05)
    assert caught.value.exit == Exit.CONFLICT


def test_ipv6_addresses_are_bracketed_in_the_url():
    other = RunningDaemon(pid=1, host="::1", port=80, socket="", started_at=0, version="1")
    assert other.url == "http://[::1]:80"


def vars_of(value: RunningDaemon) -> dict[str, object]:
    return {name: getattr(value, name) for name in RunningDaemon.__slots__}
