"""What is left to finish when a process ends: once, the latest first, also where Python does not end it."""

import os
import platform
import subprocess
import sys
import threading

import pytest

from llmbox.engine.hardware import proc as ending


@pytest.fixture
def done(monkeypatch):
    monkeypatch.setattr(ending, "_unfinished", [])
    monkeypatch.setattr("atexit.register", lambda _: None)
    return []


def test_the_latest_comes_first_and_all_of_it_once(done):
    for name in "abc":
        ending.at_exit(lambda name=name: done.append(name))
    ending.finish()
    ending.finish()
    assert done == ["c", "b", "a"]


def test_what_ends_something_that_is_left_to_finish_may_finish_it(done):
    ending.at_exit(lambda: done.append("a"))
    ending.at_exit(ending.finish)
    ending.finish()
    assert done == ["a"]


@pytest.mark.parametrize(
    ("end", "told"), [("", "done\n"), ("finish(); os._exit(0)", "done\n"), ("os._exit(0)", "")]
)
def test_processes(end, told):
    program = f"""
import os
import platform
from llmbox.engine.hardware.proc import at_exit, finish
at_exit(lambda: print("done", flush=True))
{end}
"""
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == told


def test_an_end_without_pythons_own():
    """Threads that nobody waits for, and libraries that never would be done."""
    program = """
import atexit, logging, threading
from llmbox.engine.hardware.proc import at_exit, exit_process
logging.basicConfig(format="%(message)s")
atexit.register(print, "late")
at_exit(lambda: print("done"))
threading.Thread(target=threading.Event().wait).start()
logging.warning("told")
exit_process(3)
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "done\n", "told\n")


def test_ends_of_other_processes_are_awaited_but_not_for_long():
    other = subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE)
    ending.await_exits([other.pid], 0.0)
    assert other.poll() is None
    threading.Timer(0.05, other.stdin.close).start()
    ending.await_exits([other.pid], 300.0)
    assert os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    other.wait()
    ending.await_exits([other.pid], 300.0)  # it is gone


def test_a_forked_child_has_no_files_tasks_or_context_of_its_parent():
    """It runs what it is told to, and its exit status is what that returned."""
    program = """
import os, sys
from contextvars import ContextVar
from llmbox.engine.hardware.proc import at_exit, fork_child
asked = ContextVar("asked", default="nobody")
asked.set("the parent")
at_exit(lambda: print("finished by", os.getpid() == parent))
sys.stdout.write("once\\n")
parent, (kept, write), (closed, _) = os.getpid(), os.pipe(), os.pipe()

def run():
    at_exit(lambda: os.write(write, b"done"))
    try:
        os.fstat(closed)
    except OSError:
        os.write(write, asked.get().encode() + b" ")
    return 7

pid = fork_child(run, (write,))
os.close(write)
status = os.waitpid(pid, 0)[1]
print(os.waitstatus_to_exitcode(status), os.read(kept, 99).decode())
failed = fork_child(lambda: 1 // 0, ())
print(os.waitstatus_to_exitcode(os.waitpid(failed, 0)[1]))
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert ran.stdout == "once\n7 nobody done\n70\nfinished by True\n"
    assert "ZeroDivisionError" in ran.stderr


KEPT_PAGES = """
from llmbox.engine.hardware.proc import map_large_blocks, trim_heap
MIB = 1 << 20
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon"))
{call}
bytes(24 * MIB)  # freed: glibc then takes blocks up to this size from its heap
start = resident()
between = []
blocks = []
for _ in range(64):
    blocks.append(b"x" * (4 * MIB))
    between.append(b"y" * 100_000)
blocks.clear()
{after}
print(resident() - start)
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver()[0], reason="an allocator of another kind")
@pytest.mark.parametrize("call", [("map_large_blocks()", ""), ("", "trim_heap()")])
def test_freed_blocks_go_back_to_the_kernel(call):
    program = KEPT_PAGES.format(call=call[0], after=call[1])
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 16  # MiB, of 256
