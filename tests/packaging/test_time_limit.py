"""A test that hangs fails by itself: in a lock, in an event loop, in a process that it waits for."""

import asyncio
import subprocess
import sys
import threading

import pytest

from support.time_limit import time_limit


def wait_for_nobody() -> None:
    threading.Event().wait()


def wait_in_a_loop() -> None:
    asyncio.run(asyncio.Event().wait())


def wait_for_a_process() -> None:
    subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(600)"])


@pytest.mark.parametrize("hang", [wait_for_nobody, wait_in_a_loop, wait_for_a_process])
def test_what_hangs_fails_with_the_stacks_of_all_threads(hang, capfd):
    with pytest.raises(pytest.fail.Exception, match=r"longer than 0\.1 s"), time_limit(0.1):
        hang()
    assert hang.__name__ in capfd.readouterr().err


def test_a_limit_inside_another_one_leaves_it_running(capfd):
    def wait_after_an_inner_one() -> None:
        with time_limit(60.0):
            pass
        wait_for_nobody()

    with pytest.raises(pytest.fail.Exception, match=r"longer than 0\.2 s"), time_limit(0.2):
        wait_after_an_inner_one()
    assert "wait_for_nobody" in capfd.readouterr().err
