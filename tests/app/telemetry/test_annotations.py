"""Marks beside the history: which events leave one, what is kept, what a broken store costs."""

import pytest

from llmbox.app.store import RequestLog
from llmbox.app.telemetry.history import KEPT_S, REFUSALS_S, Annotations

NOON = 1_800_014_400.0


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    yield log
    log.close()


def refused(model="m", code="queue_full", status=429):
    return {"model": model, "error_code": code, "http_status": status}


async def test_what_happened_outlives_the_daemon(store):
    clock = Clock()
    marks = Annotations(store, clock)
    marks.take("model.ready", {"model": "a", "cause": ""})
    clock.now += 5
    marks.take("model.evicted", {"model": "a", "reason": "to make room for b", "freed": 1})
    marks.take("tick", {})
    marks.take("model.refused", {"model": "b", "cause": "b needs 3 GB"})
    clock.now += 1
    marks.take("model.stopped", {"model": "a", "cause": "unloaded"})
    marks.close()
    store.flush()
    found = await Annotations(store, clock).since(NOON - 60)
    assert [(mark.kind, mark.model, mark.text) for mark in found] == [
        ("refusal", "b", "b needs 3 GB"),
        ("eviction", "a", "to make room for b"),
        ("load", "a", "ready"),
    ]
    assert await Annotations(store, clock).since(NOON + 1) == found[:2]


async def test_refusals_of_ten_seconds_are_one_mark_and_4xx_of_callers_none(store):
    clock = Clock()
    marks = Annotations(store, clock)
    for _ in range(3):
        marks.take("request.refused", refused())
    marks.take("request.refused", refused(code="model_not_found", status=404))
    clock.now += REFUSALS_S
    marks.take("request.refused", refused())
    assert [mark.text for mark in await marks.since(0)] == [
        "1 request refused: queue_full",
        "3 requests refused: queue_full",
    ]


async def test_old_marks_go(store):
    clock = Clock()
    marks = Annotations(store, clock)
    marks.take("model.failed", {"model": "a", "cause": "bad_model"})
    clock.now += KEPT_S + 1
    marks.take("model.ready", {"model": "b", "cause": ""})
    store.flush()
    assert [mark.model for mark in await Annotations(store, clock).since(0)] == ["b"]


async def test_a_damaged_file_costs_only_what_was_on_it(tmp_path, store):
    marks = Annotations(store)
    marks.take("model.ready", {"model": "a", "cause": ""})
    store.flush()
    store.path.write_bytes(b"not a database" * 1000)
    marks.take("model.restarting", {"model": "a", "cause": "killed"})
    store.flush()
    assert {mark.kind for mark in await marks.since(0)} == {"load", "restart"}
