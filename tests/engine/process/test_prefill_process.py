"""The process of a prefill engine: replaced where it ends or hangs, given up where it always does."""

import os
import sys

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.executor.prefill_process import (
    MOST_DEATHS,
    SILENT_SECONDS,
    PrefillFailed,
    PrefillProcess,
)
from llmbox.engine.ipc.spawn import Launch
from support.clock import Clock

CONFIG = EngineConfig(model_path="/nowhere", name="tiny")
SLEEPS = (
    sys.executable,
    "-S",
    "-c",
    "import sys; sys.stdin.read()\nwhile True: __import__('signal').pause()",
)


@pytest.fixture
def start():
    links, handles = [], []

    def open_link(*command, clock):
        handles.append(os.memfd_create("test"))
        cores = sorted(os.sched_getaffinity(0))[:1]
        links.append(PrefillProcess(cores, handles[-1], Launch(command), clock))
        return links[-1]

    yield open_link
    for link in links:
        link.close()
        assert link.pid == 0
    for handle in handles:
        os.close(handle)


def test_a_load_that_fails_says_so_and_leaves_no_process(start):
    link = start("/bin/false", clock=Clock())
    with pytest.raises(PrefillFailed, match="the prefill engine: it ended while loading"):
        link.load(CONFIG, lambda progress: None)
    assert link.pid == 0


def test_engines_that_die_at_once_are_given_up(start):
    clock = Clock()
    link = start("/bin/false", clock=clock)
    link._config = CONFIG
    for _ in range(400):
        link.receive(is_waiting=False)
        clock.now += 1.0 if link.pid == 0 else 0.0
        link.wait(0.02 if link.pid else 0.0)
        if link.is_given_up:
            break
    assert (link.is_given_up, link.deaths, link.pid) == (True, MOST_DEATHS, 0)
    link.receive(is_waiting=True)
    assert link.pid == 0


def test_an_engine_that_owes_an_answer_and_does_nothing_is_replaced(start):
    clock = Clock()
    link = start(*SLEEPS, clock=clock)
    link._config = CONFIG
    first = link.pid
    link.receive(is_waiting=False)
    clock.now += 100.0
    link.receive(is_waiting=False)
    assert link.deaths == 0, "it owes nothing"
    for _ in range(400):
        link.wait(0.05)
        clock.now += SILENT_SECONDS + 0.1
        link.receive(is_waiting=True)
        if link.deaths:
            break
    assert link.deaths == 1
    link.receive(is_waiting=True)
    assert link.pid not in {0, first}
