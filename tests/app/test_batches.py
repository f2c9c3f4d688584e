"""Batches run to their end: in bounds, over restarts, busy models, cancellation, expiry and full disks."""

import asyncio
import contextlib
import json
from collections import Counter

import pytest

from llmbox.app import batches as runner_module
from llmbox.app.batches import BatchRunner, RouteAnswer
from llmbox.app.errors import ApiError
from llmbox.app.store import RequestLog
from llmbox.app.store.batches import BatchItem, BatchPage, BatchStore
from llmbox.app.store.record import StoreError
from support.engines import until


@pytest.fixture
def log(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    yield log
    log.close()


@pytest.fixture
def store(log):
    return BatchStore(log)


class Route:
    """Answers when it is let; counts what was asked."""

    def __init__(self, *, open_: bool = True) -> None:
        self.asked: Counter[str] = Counter()
        self.owners: set[str] = set()
        self.running = self.most = 0
        self.go = asyncio.Event()
        self.first: list[RouteAnswer] = []
        """Answers that come before those of the route."""
        if open_:
            self.go.set()

    async def __call__(self, path: str, body: bytes, owner: str) -> RouteAnswer:
        self.asked[json.loads(body)["n"]] += 1
        self.owners.add(owner)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        return self.first.pop(0) if self.first else RouteAnswer(status=200, body=b'{"to": %b}' % body)


def items(count: int) -> list[BatchItem]:
    return [BatchItem(custom_id=f"c{n}", path="/p", body=b'{"n": %d}' % n) for n in range(count)]


@contextlib.asynccontextmanager
async def running(store, route, *, most_at_once=4, most_bytes=1 << 20):
    runner = BatchRunner(store, most_at_once=most_at_once, most_bytes=most_bytes)
    runner.start(route)
    try:
        yield runner
    finally:
        await runner.close()


async def ended(store, batch):
    async with asyncio.timeout(180):
        while (found := await store.get(batch.kind, batch.owner, batch.id)).ended is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def test_every_request_is_answered_once_and_a_bounded_number_runs_at_once(store):
    route = Route(open_=False)
    async with running(store, route) as runner:
        batch = await runner.create("openai", "key_1", "batch_", items(200), details={"a": 1})
        assert (batch.total, batch.counts.pending, batch.details) == (200, 200, {"a": 1})
        await until(lambda: route.running == 4)
        route.go.set()
        done = await ended(store, batch)
    assert (done.counts.succeeded, done.counts.pending) == (200, 0)
    assert set(route.asked.values()) == {1}
    assert (route.most, route.owners) == (4, {"key_1"})
    found = await store.results(done.seq, 0, 1000)
    assert [each.custom_id for each in found] == [f"c{n}" for n in range(200)]
    assert [json.loads(each.answer)["to"]["n"] for each in found] == list(range(200))


async def test_what_has_no_answer_runs_again_after_a_restart(store):
    route = Route(open_=False)
    async with running(store, route) as runner:
        batch = await runner.create("anthropic", "", "b_", items(6))
        await until(lambda: route.running == 4)
        route.first = [RouteAnswer(status=400, body=b"{}")]
        route.go.set()
        await until(lambda: route.asked.total() > 5)
    before = {result.custom_id for result in await store.results(batch.seq, 0, 100)}
    again = Route()
    async with running(store, again):
        done = await ended(store, batch)
    assert done.counts.succeeded + done.counts.failed == 6
    assert not before & {f"c{n}" for n in again.asked}


async def test_an_answer_to_being_cut_off_is_none(store):
    started = asyncio.Event()

    async def cut_off(path, body, owner):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return RouteAnswer(status=503, body=b"{}")

    async with running(store, cut_off) as runner:
        batch = await runner.create("openai", "", "b_", items(1))
        await started.wait()
        await asyncio.wait_for(runner.close(), 60)
    assert (await store.get("openai", "", batch.id)).counts.pending == 1


async def test_busy_and_loading_models_are_asked_again(store, monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def quick(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(runner_module.asyncio, "sleep", quick)
    route = Route()
    route.first = [RouteAnswer(status=429, body=b"", retry_after=7.0), RouteAnswer(status=503, body=b"")]
    async with running(store, route) as runner:
        done = await ended(store, await runner.create("openai", "", "b_", items(1)))
        assert (done.counts.succeeded, route.asked.total()) == (1, 3)
        assert {7.0, 2.0} <= set(pauses)
        route.first = [RouteAnswer(status=503, body=b"{}")] * 50
        down = await ended(store, await runner.create("openai", "", "b_", items(1)))
        assert down.counts.failed == 1


async def test_a_batch_that_is_refused_for_its_key_holds_up_no_other(store):
    async def send(path, body, owner):
        if owner == "key_limited":
            return RouteAnswer(status=429, body=b"", retry_after=3600.0)
        return RouteAnswer(status=200, body=b"{}")

    async with running(store, send, most_at_once=2) as runner:
        limited = await runner.create("openai", "key_limited", "b_", items(20))
        other = await runner.create("openai", "key_other", "b_", items(20))
        done = await asyncio.wait_for(ended(store, other), 60)
        assert done.counts.succeeded == 20
        assert (await store.get("openai", "key_limited", limited.id)).counts.pending == 20


async def test_a_cancelled_batch_keeps_its_answers_and_frees_the_engine(store):
    route = Route(open_=False)
    async with running(store, route, most_at_once=1) as runner:
        batch = await runner.create("openai", "", "b_", items(3))
        await until(lambda: route.running == 1)
        await runner.cancel(batch)
        assert route.running == 0
        done = await store.get("openai", "", batch.id)
        assert (done.cancelled, done.counts.cancelled) != (None, 0)
        assert done.ended is not None
        await runner.cancel(done)
        assert await store.get("openai", "", batch.id) == done
        await runner.delete(done)
        assert await store.get("openai", "", batch.id) is None
        assert await store.size("") == 0


async def test_requests_that_find_no_time_expire(store):
    route = Route(open_=False)
    async with running(store, route) as runner:
        done = await ended(store, await runner.create("openai", "", "b_", items(9), seconds=0.05))
    assert (done.counts.expired, done.cancelled) == (9, None)
    assert route.running == 0


async def test_only_its_owner_finds_it_and_pages_go_both_ways(store):
    async with running(store, Route()) as runner:
        made = [await runner.create("openai", "key_1", "b_", items(1)) for _ in range(5)]
    ids = [batch.id for batch in reversed(made)]

    async def page(**fields):
        found = await store.find(BatchPage(**{"kind": "openai", "owner": "key_1", **fields}))
        return None if found is None else [batch.id for batch in found]

    assert await page() == ids
    assert await page(after=ids[1], limit=2) == ids[2:5]
    assert await page(before=ids[3], limit=1) == [ids[2], ids[1]]
    assert await page(after="b_x") is None
    for other in ({"owner": "key_2"}, {"kind": "anthropic"}):
        assert await page(**other) == []
        assert await page(**other, after=ids[0]) is None


async def test_an_owner_has_bounded_room(store):
    async with running(store, Route(), most_bytes=300) as runner:
        await runner.create("openai", "a", "b_", items(10))
        with pytest.raises(ApiError, match=r"requests\.batch_bytes"):
            await runner.create("openai", "a", "b_", items(40))
        await runner.create("openai", "b", "b_", items(10))


async def test_an_answer_waits_for_the_disk(store, monkeypatch):
    record, failures = store.record, [StoreError("disk full")] * 3

    async def failing(*args):
        if failures:
            raise failures.pop()
        await record(*args)

    monkeypatch.setattr(store, "record", failing)
    monkeypatch.setattr(runner_module, "_DISK_PAUSE_S", 0.0)
    route = Route()
    async with running(store, route) as runner:
        done = await ended(store, await runner.create("openai", "", "b_", items(1)))
    assert (done.counts.succeeded, route.asked.total()) == (1, 1)
