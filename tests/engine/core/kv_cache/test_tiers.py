"""Blocks on disk behind the prefix cache: the same tokens, from fewer computed ones."""

import random
import shutil
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmbox.engine.core import engine as engine_module
from llmbox.engine.core.kv_cache import tiers
from llmbox.engine.core.kv_cache.prefix_cache import extend_hashes
from llmbox.engine.core.kv_cache.state_manager import pool_blocks
from llmbox.engine.kv_store import store_threads
from llmbox.engine.kv_store.block_file import HEADER_BYTES, MAGIC, zlib_checksums
from llmbox.engine.kv_store.store import BlockStore, ModelFiles
from support.fake_runner import expected_output
from support.kv_tiers import SECONDS, CopiesEvent, TieredEngine, write_out
from support.lanes import nightly
from support.scheduling import make_request

KINDS = {
    "attention": {},
    "hybrid": {"state_slots": 20},
    "window": {"window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
    "hybrid, window": {"state_slots": 20, "window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
}
POOLS = {
    "roomy": {},
    "tight": {"num_blocks": 13},
    "overlap": {"depth": 1, "polls": 3},
    "drafts": {"draft_rows": 12},
}


FIELDS_BYTES = HEADER_BYTES - 8
"""Bytes of the header before its two checksums."""
VERSION_AT, MODEL_AT = len(MAGIC), len(MAGIC) + 16


def workload(seed, suffix=""):
    rng = random.Random(seed)
    prefixes = [[rng.randrange(9) for _ in range(length)] for length in (8, 13, 21)]
    return [
        make_request(
            f"r{number}{suffix}",
            rng.choice(prefixes) + [number] * rng.randrange(1, 12),
            namespace=(tenant := rng.choice(["", "alice"])),
            tenant=tenant,
            max_tokens=rng.randrange(1, 20),
            temperature=float(number % 2),
            seed=number,
        )
        for number in range(10)
    ]


def serve(engine, requests):
    """Run them and check each token; return the blocks that came from disk."""
    for request in requests:
        engine.add(request)
    answers = engine.run()
    for request in requests:
        found = answers[request.request_id]
        assert found.finish_reason in {"length", "stop"}
        expected = expected_output(request.cache_namespace, request.prompt_ids, request.params)
        assert found.token_ids == expected
    return sum(answers[request.request_id].outputs[0].disk_tokens or 0 for request in requests)


class Engines:
    """Engines that a test has started and not closed itself."""

    def __init__(self) -> None:
        self.opened: list[TieredEngine] = []

    def __call__(self, root: Path, **options) -> TieredEngine:
        self.opened.append(TieredEngine(root, **options))
        return self.opened[-1]


@pytest.fixture
def engines():
    started = Engines()
    yield started
    for engine in started.opened:
        engine.tiers.close(SECONDS)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_engine_goes_on_from_the_blocks_of_the_last_one(tmp_path, engines, kind, pool):
    options = KINDS[kind] | POOLS[pool]
    for seed in range(3):
        root = tmp_path / str(seed)
        first = engines(root, **options)
        serve(first, workload(seed))
        first.close()
        second = engines(root, **options)
        from_disk = serve(second, workload(seed, " again"))
        assert from_disk > 0 or pool == "tight", (
            "blocks of a tight pool may be evicted before they are written"
        )
        assert second.store.counters.damaged == 0


def test_what_memory_evicted_comes_back_from_disk(tmp_path, engines):
    engine = engines(tmp_path, num_blocks=12)
    serve(engine, [make_request("long", range(100, 132))])
    write_out(engine.tiers)
    serve(engine, [make_request("other", range(200, 236))])
    assert serve(engine, [make_request("again", range(100, 132))]) == 24


@pytest.mark.parametrize(
    ("arrived", "is_ended", "is_full", "looks"),
    [
        (0, False, False, False),
        (7, False, False, False),
        (8, False, False, True),
        (1, True, False, True),
        (1, False, True, True),
    ],
)
def test_an_idle_engine_looks_again_for_several_blocks(
    tmp_path, engines, monkeypatch, arrived, is_ended, is_full, looks
):
    """For each block it took the interpreter from the thread that reads, for longer than that one needs."""
    tiers, asked = engines(tmp_path).tiers, []
    job = SimpleNamespace(arrived=[None] * arrived, is_ended=is_ended)
    monkeypatch.setattr(tiers.reads, "_reading", {"r": SimpleNamespace(job=job, held=[])})
    monkeypatch.setattr(BlockStore, "is_full", is_full)
    monkeypatch.setattr(BlockStore, "wait", lambda _self, seconds, until: asked.append((seconds, until())))
    tiers.reads.wait(0.005)
    assert asked == [(0.005, looks)]


def test_a_reader_whose_buffers_are_full_has_its_blocks_taken(tmp_path, engines, monkeypatch):
    """Else each of few buffers would wait for the longest time that an engine is idle."""
    first = engines(tmp_path)
    serve(first, [make_request("first", range(100, 132))])
    first.close()
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 10 * SECONDS)
    second = engines(tmp_path, store={"queue_bytes": 1})
    assert serve(second, [make_request("again", range(100, 132))]) == 28


@pytest.mark.parametrize("count", [40, nightly(3_500)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_never_change_a_token(tmp_path, engines, kind, count):
    """Damaged or stale, each that is read is counted and leaves the disk; `serve` checks every token."""
    rng, damaged, round_ = random.Random(kind), 0, 0
    while damaged < count:
        root = tmp_path / str(round_)
        first = engines(root, **KINDS[kind])
        serve(first, workload(round_))
        first.close()
        hurt = {
            path: damage(rng, path) for path in first.store.folder.root.glob("*/*/*") if rng.random() < 0.3
        }
        second = engines(root, **KINDS[kind])
        serve(second, workload(round_, " again"))
        second.close()
        left = [path for path, data in hurt.items() if path.is_file() and path.read_bytes() == data]
        assert second.store.counters.damaged == len(hurt) - len(left)
        damaged += second.store.counters.damaged
        round_ += 1
        shutil.rmtree(root)
        engines.opened.clear()


def damage(rng: random.Random, path: Path) -> bytes:
    """Flip bits, cut, extend or zero a file, or put that of another block, model or version in its place.
    Returns what the file holds now.
    """
    whole = path.read_bytes()
    data = bytearray(whole)
    while data == whole:
        match rng.randrange(7):
            case 0 | 1:
                for _ in range(rng.choice([1, 1, 2, 40])):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 2:
                del data[rng.randrange(len(data)) :]
            case 3:
                data += rng.randbytes(rng.randrange(1, 40))
            case 4:
                start = rng.randrange(len(data))
                data[start:] = bytes(len(data) - start)
            case 5:
                others = [each for each in path.parent.iterdir() if each != path]
                data = bytearray(rng.choice(others).read_bytes() if others else b"")
            case 6:
                data = stale_file(rng, whole)
    path.write_bytes(data)
    return bytes(data)


def stale_file(rng: random.Random, whole: bytes) -> bytearray:
    """The same block as another version or another model wrote it, with checksums that are right."""
    fields, payload = bytearray(whole[:FIELDS_BYTES]), whole[HEADER_BYTES:]
    fields[rng.choice([VERSION_AT, MODEL_AT])] ^= 1
    sums = zlib_checksums(payload, *zlib_checksums(bytes(fields), 0, 1))
    return fields + struct.pack("<II", *sums) + payload


def test_blocks_of_another_key_are_neither_found_nor_told(tmp_path, engines):
    engine = engines(tmp_path)
    prompt = range(100, 140)
    serve(engine, [make_request("owner", prompt, tenant="a", namespace="a/")])
    engine.close()
    second = engines(tmp_path)
    probe = make_request("probe", prompt, tenant="b", namespace="b/")
    assert serve(second, [probe]) == 0
    assert second.store.counters.read_bytes == 0
    assert serve(second, [make_request("owner again", prompt, tenant="a", namespace="a/")]) == 36


def test_a_request_that_memory_has_no_room_for_reads_when_it_is_admitted(tmp_path, engines):
    first = engines(tmp_path)
    serve(first, [make_request("a", range(100, 140))])
    first.close()
    engine = engines(tmp_path, num_blocks=16)
    engine.add(make_request("runs", range(200, 236), max_tokens=12))
    engine.step()
    engine.add(make_request("waits", range(100, 140), max_tokens=4))
    assert not engine.tiers.reads.is_reading
    answers = engine.run()
    assert answers["waits"].outputs[0].disk_tokens == 36


def test_a_preempted_request_computes_nothing_again_that_the_disk_has(tmp_path, engines):
    engine = engines(tmp_path, num_blocks=14)
    requests = [
        make_request(f"r{number}", range(number, number + 20), max_tokens=30) for number in (100, 200)
    ]
    for request in requests:
        engine.add(request)
    end = 400
    while engine.engine.has_work and end:
        engine.step()
        write_out(engine.tiers)
        end -= 1
    assert engine.scheduler.active.preemptions
    for request in requests:
        expected = expected_output("", request.prompt_ids, request.params)
        assert engine.answers[request.request_id].token_ids == expected
    computed = sum(row.num_tokens for plan in engine.runner.plans for row in plan.rows)
    assert computed < 2 * 50 + engine.scheduler.active.preemptions * 2 * 4


def test_a_request_waits_until_the_files_are_listed(tmp_path, engines, monkeypatch):
    first = engines(tmp_path)
    serve(first, [make_request("a", range(100, 140))])
    first.close()
    go, real = threading.Event(), ModelFiles.list

    def slow(files):
        assert go.wait(SECONDS)
        real(files)

    monkeypatch.setattr(ModelFiles, "list", slow)
    monkeypatch.setattr(BlockStore, "wait", lambda *_: True)
    engine = engines(tmp_path)
    monkeypatch.undo()
    engine.add(make_request("b", range(100, 140)))
    assert not engine.scheduler.schedule().rows
    go.set()
    engine.run()
    assert engine.answers["b"].outputs[0].disk_tokens == 36


def test_a_slow_disk_is_waited_for_to_a_limit(tmp_path, engines, monkeypatch):
    first = engines(tmp_path)
    serve(first, [make_request("a", range(100, 140))])
    first.close()
    now, go, real = [0.0], threading.Event(), store_threads.read_block

    def slow(*args):
        assert go.wait(SECONDS)
        real(*args)

    monkeypatch.setattr(store_threads, "read_block", slow)
    engine = engines(tmp_path)
    engine.tiers.reads._clock = lambda: now[0]
    request = make_request("b", range(100, 140))
    engine.add(request)
    assert not engine.scheduler.schedule().rows
    now[0] = 1.15  # a second, and half of what 36 tokens are taken to need
    assert not engine.scheduler.schedule().rows
    now[0] = 1.19
    assert engine.scheduler.schedule().rows
    assert engine.tiers.reads.num_late == 1
    (late,) = engine.scheduler.running
    assert late.prefix_end == "late"
    go.set()


def test_an_aborted_request_reads_no_further(tmp_path, engines):
    first = engines(tmp_path)
    serve(first, [make_request("a", range(100, 140))])
    first.close()
    engine = engines(tmp_path)
    engine.add(make_request("b", range(100, 140)))
    engine.abort("b")
    assert not engine.engine.has_work
    engine.scheduler.check()
    assert serve(engine, [make_request("c", range(100, 140))]) == 36


def test_blocks_that_may_be_wrong_leave_the_disk_too(tmp_path, engines):
    engine = engines(tmp_path)
    request = make_request("bad", range(100, 140))
    engine.runner.poisoned.add("bad")
    engine.add(request)
    engine.run()
    assert engine.answers["bad"].finish_reason == "error"
    engine.close()
    assert not list(tmp_path.glob("*/*/*"))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_were_on_their_way_leave_the_disk_too(tmp_path, engines, kind):
    engine = engines(tmp_path, polls=1000, **KINDS[kind])
    engine.add(make_request("bad", range(100, 140), max_tokens=30))
    for _ in range(5):
        engine.step()
    assert engine.tiers.writes._copies
    engine.runner.poisoned.add("bad")
    engine.run()
    assert engine.answers["bad"].finish_reason == "error"
    engine.close()
    assert not list(tmp_path.glob("*/*/*"))


def test_nobody_takes_in_blocks_that_may_be_wrong(tmp_path, engines):
    first = engines(tmp_path)
    serve(first, [make_request("a", range(100, 140))])
    first.close()
    engine = engines(tmp_path)
    engine.add(make_request("b", range(100, 140)))
    assert engine.store.wait(SECONDS, lambda: engine.tiers.reads._reading["b"].job.is_ended)
    bad = make_request("bad", range(100, 140))
    extend_hashes(bad, 4, 9)
    engine.tiers.note_suspect(bad)
    engine.run()
    assert engine.answers["b"].outputs[0].disk_tokens in {None, 0}
    assert serve(engine, [make_request("c", range(200, 240))]) == 0
    write_out(engine.tiers)


def test_a_resumed_request_computes_nothing_again(tmp_path, engines):
    first = engines(tmp_path)
    request = make_request("a", range(100, 140), max_tokens=30)
    first.add(request)
    for _ in range(13):
        first.step()
    write_out(first.tiers)
    said = first.answers["a"].token_ids
    second = engines(tmp_path)
    second.add(make_request("a", range(100, 140), output=said, max_tokens=30))
    second.run()
    assert said + second.answers["a"].token_ids == expected_output("", request.prompt_ids, request.params)
    computed = sum(row.num_tokens for plan in second.runner.plans for row in plan.rows)
    assert computed <= 4 + 30 - len(said)


def test_beside_steps_blocks_take_a_share_of_the_time_and_the_rest_when_nothing_runs(
    tmp_path, engines, monkeypatch
):
    """Writing costs a share of a core, however slow the files of this machine are."""
    now = [0.0]
    engine = engines(tmp_path)
    monkeypatch.setattr(engine.tiers.writes, "_clock", lambda: now[0])
    monkeypatch.setattr(tiers.time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(tiers, "BUSY_BURST", 1.0)
    monkeypatch.setattr(tiers, "BUSY_SHARE", 0.01)
    writes, block = engine.tiers.writes, engine.memory.sizes["kv"]
    engine.store._writer.seconds_per_byte = 0.005 / block
    writes._credit, writes._credited = -1.0, 0.0
    serve(engine, [make_request("long", range(100, 132), max_tokens=1)])
    engine.store._writer.seconds_per_byte = 0.005 / block
    writes._credit = 0.0
    waiting = len(writes._pending)
    assert waiting >= 8
    now[0] = 0.98
    engine.tiers.pump(sparingly=True)
    assert len(writes._pending) == waiting - 2, "two blocks are a hundredth of a second"
    engine.tiers.pump(sparingly=True)
    assert len(writes._pending) == waiting - 2
    write_out(engine.tiers)
    assert not writes._pending


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_request_used_is_used_last(tmp_path, engines, kind, monkeypatch):
    """Keys and values without their window or state are of no use."""
    engine, touched = engines(tmp_path, **KINDS[kind]), []
    monkeypatch.setattr(engine.store, "touch", touched.extend)
    serve(engine, [make_request("a", range(100, 132), max_tokens=4)])
    assert {each.kind for each in touched} == set(engine.memory.sizes)


def test_copies_take_no_more_buffers_than_may_be_queued(tmp_path, engines):
    """Another rank may be slow to copy its part."""
    engine = engines(tmp_path)
    block = engine.memory.sizes["kv"]
    engine.store._writer._limit = 3 * block
    engine.memory.polls = 1_000_000
    serve(engine, [make_request("long", range(100, 132), max_tokens=1)])
    for _ in range(4):
        engine.tiers.pump()
    assert sum(len(copies.saved) for copies in engine.tiers.writes._copies) == 3
    assert engine.store._buffers._bytes == 3 * block
    engine.memory.polls = 0  # later copies are done at once
    for copies in engine.tiers.writes._copies:
        copies.event.wait()
    write_out(engine.tiers)
    assert engine.store.num_blocks == 8


def test_a_buffer_that_cannot_be_made_fails_no_step(tmp_path, engines, monkeypatch):
    engine = engines(tmp_path)

    def refuse(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.store, "take_buffer", refuse)
        serve(engine, [make_request("a", range(100, 132), max_tokens=1)])
        while engine.tiers.pump():
            assert not engine.tiers.writes._copies
    assert engine.store.num_blocks == 0
    assert engine.tiers.stats()["disk_skipped"] == 8


def test_a_close_waits_for_no_copy_beyond_its_time(tmp_path, engines, monkeypatch):
    """A rank that stands still would hold the engine for half a minute."""
    engine = engines(tmp_path, polls=1_000_000)
    engine.add(make_request("a", range(100, 132), max_tokens=1))
    for _ in range(5):
        engine.step()
    assert engine.tiers.writes._copies

    def refuse(_):
        raise AssertionError("waited")

    engine.tiers.pump()
    with monkeypatch.context() as patch:
        patch.setattr(CopiesEvent, "wait", refuse)
        engine.tiers.close(0.0)
    engines.opened.remove(engine)  # its copies are never done
