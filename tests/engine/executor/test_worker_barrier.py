"""Rank 0 hears what workers say in any order, and of one that fails at once."""

import signal
import socket
import subprocess
import sys

import pytest

from llmbox.engine.distributed.step_codec import Frame, Link
from llmbox.engine.errors import RankLost
from llmbox.engine.executor import workers
from llmbox.engine.executor.workers import Worker, WorkerBarrier, WorkerLoadFailed


@pytest.fixture
def start():
    """Workers that sleep, and the ends of their sockets."""
    opened = []

    def begin():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        opened.append((process, ours, theirs))
        return Worker(len(opened), process, Link(ours)), Link(theirs)

    yield begin
    for process, ours, theirs in opened:
        process.kill()
        process.wait()
        ours.close()
        theirs.close()


def say(link, kind, **body):
    link.send(Frame(kind, body).encode())


def test_answers_come_in_any_order_and_are_told_in_that_of_ranks(start):
    (one, first), (two, second) = start(), start()
    call = WorkerBarrier([one, two], "loaded")
    call.poll()
    say(second, "loaded", measured=2)
    call.poll()
    say(first, "loaded", measured=1)
    assert call.wait() == [{"measured": 1}, {"measured": 2}]


def test_one_that_refuses_is_heard_while_others_still_load(start):
    (one, _first), (two, second) = start(), start()
    call = WorkerBarrier([one, two], "loaded")
    say(second, "refused", code="bad_model", message="a tensor is missing")
    with pytest.raises(WorkerLoadFailed, match="rank 2: a tensor is missing") as refused:
        call.poll()
    assert refused.value.code == "bad_model"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "rank 1 was killed while loading.*load with less --memory"),
        (signal.SIGSEGV, "signal 11"),
    ],
)
def test_how_one_ended_is_told(start, number, words):
    worker, theirs = start()
    call = WorkerBarrier([worker], "loaded")
    worker.process.send_signal(number)
    worker.process.wait()
    theirs.end()
    with pytest.raises(RankLost, match=words):
        call.wait()


def test_one_that_closed_its_end_and_lives_on_is_not_waited_for(start, monkeypatch):
    monkeypatch.setattr(workers, "_END_SECONDS", 0.05)
    worker, theirs = start()
    theirs.end()
    with pytest.raises(RankLost, match="rank 1 closed its end"):
        WorkerBarrier([worker], "loaded").wait()


def test_one_that_is_stopped_is_told_and_one_that_goes_on_again_is_not(start, monkeypatch):
    monkeypatch.setattr(workers, "_TICK", 0.02)
    monkeypatch.setattr(workers, "STOPPED_SECONDS", 0.2)
    (one, first), (two, _second) = start(), start()
    say(first, "loaded")
    one.process.send_signal(signal.SIGSTOP)  # it has answered: nobody waits for it
    two.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankLost, match="rank 2 was stopped before it was loaded"):
        WorkerBarrier([one, two], "loaded").wait()
