"""What is left to finish when a process ends: once, the latest first, also where Python does not end it."""

import subprocess
import sys

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
