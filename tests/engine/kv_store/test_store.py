"""Files of KV blocks: limits, owners, damage, and disks that fail."""

import contextlib
import errno
import json
import os
import random
import threading
import time
from pathlib import Path

import pytest

from llmbox.engine.kv_store import store as store_module
from llmbox.engine.kv_store import store_threads, usage
from llmbox.engine.kv_store.block_file import HEADER_BYTES
from llmbox.engine.kv_store.folder import KVFolder, KVFolderUnusable
from llmbox.engine.kv_store.store import BlockStore, ModelFiles
from llmbox.engine.kv_store.store_threads import BlockBuffers, BlockWrite
from llmbox.engine.kv_store.usage import TURN_END_SECONDS, UsageFile, filesystem_of
from support.kv_tiers import MODEL, SECONDS, open_folder, open_store
from support.lanes import nightly

SIZE = 1000
FILE = SIZE + HEADER_BYTES


@pytest.fixture
def opened():
    stores: list[BlockStore] = []
    yield lambda *args, **options: stores.append(open_store(*args, **options)) or stores[-1]
    for each in stores:
        each.close(SECONDS)


def address(store, number, owner="", kind="kv"):
    return store.address(store.folder.owner(owner), kind, number.to_bytes(4, "big"))


def put(store, numbers, owner="", *, ends=()):
    for number in numbers:
        data = store.take_buffer(SIZE)
        data[:] = bytes([number % 256]) * SIZE
        store.write(BlockWrite(address(store, number, owner), data, bool(owner), number in ends))
        assert store.wait(SECONDS, lambda: store.has_written_all)
        with contextlib.suppress(FileNotFoundError):  # the kernel's own times are equal for some milliseconds
            os.utime(store._files.path(address(store, number, owner)), ns=(now := time.time_ns(), now))


def get(store, numbers, owner=""):
    """Return the outcomes, and check the content of what was read."""
    job = store.read([(address(store, number, owner), SIZE) for number in numbers])
    assert store.wait(SECONDS, lambda: job.is_ended)
    for position, outcome, data in job.arrived:
        if outcome == "read":
            assert bytes(data) == bytes([numbers[position] % 256]) * SIZE
            store.give_back(data)
    return [outcome for _, outcome, _ in job.arrived]


def test_what_is_written_is_read_by_another_store(tmp_path, opened):
    put(opened(tmp_path), range(5))
    second = opened(tmp_path)
    assert second.num_blocks == 5
    assert get(second, range(5)) == ["read"] * 5
    assert get(second, [0, 77]) == ["read", "gone"]


def test_a_start_reads_names_alone_in_a_thread(tmp_path, opened, monkeypatch):
    """A start with 100,000 files took two seconds while it read the status of each."""
    put(opened(tmp_path), range(3))
    go, real = threading.Event(), ModelFiles.list

    def slow(files):
        assert go.wait(SECONDS)
        real(files)

    def refuse(*_):
        raise AssertionError("a file's status is read")

    monkeypatch.setattr(ModelFiles, "list", slow)
    monkeypatch.setattr(KVFolder, "blocks", refuse)
    store = BlockStore(open_folder(tmp_path), MODEL, {"origins": []})
    assert not store.is_listed
    job = store.read([])
    assert not job.is_ended
    go.set()
    assert store.wait(SECONDS, lambda: job.is_ended)
    assert store.num_blocks == 3
    store.close(SECONDS)


def test_buffers_take_no_more_than_they_may():
    made = []
    buffers = BlockBuffers(lambda size: made.append(size) or memoryview(bytearray(size)), 300)
    used = [buffers.take(100) for _ in range(4)]
    for each in used:
        buffers.give_back(each)
    assert len(buffers._free) == 3, "the fourth was over"
    buffers.take(200)
    assert sum(map(len, buffers._free)) <= 100
    assert buffers.take(100) is used[-1]
    assert made == [100] * 4 + [200]


def test_a_buffer_that_cannot_be_made_costs_its_block_alone(tmp_path, opened):
    put(opened(tmp_path), [1, 2])
    refused = []

    def make(size):
        if not refused:
            refused.append(size)
            raise MemoryError
        return memoryview(bytearray(size))

    store = opened(tmp_path, make_buffer=make)
    assert get(store, [1, 2]) == ["damaged"]
    assert not store.has(address(store, 1)), "a request would ask for it again and again"
    assert store._buffers._bytes == 0
    assert get(store, [2]) == ["read"]
    put(store, [1])
    assert get(store, [1]) == ["read"]


def test_the_limit_is_kept_and_the_least_used_leave(tmp_path, opened):
    most = 100 * FILE
    store = opened(tmp_path, most)
    put(store, range(100))
    store.touch([address(store, number) for number in (3, 1)])
    for number in range(100, 130):
        put(store, [number])
        used = sum(path.stat().st_size for path in tmp_path.glob("*/*/*"))
        assert 0.97 * most <= used <= most
    assert store.has(address(store, 129))
    left = {path.name for path in tmp_path.glob("*/*/*")}
    assert address(store, 1).file_name in left, "it was used"
    assert address(store, 0).file_name not in left
    assert get(store, [0]) == ["gone"]


def test_evicted_blocks_that_a_request_had_are_stored_again(tmp_path, opened):
    store = opened(tmp_path, 9 * FILE)
    put(store, range(30))
    assert store.has(address(store, 0)), "nobody has looked since its file went"
    store.touch([address(store, number) for number in range(30)])
    assert store.wait(SECONDS, lambda: store.has_written_all)
    assert store.num_blocks == len(list(tmp_path.glob("*/*/*"))) <= 9
    put(store, [0])
    assert get(store, [0]) == ["read"]


def test_ends_of_turns_stay_longest(tmp_path, opened):
    store = opened(tmp_path, 20 * FILE)
    put(store, range(40), ends={0, 1})
    assert get(store, [0, 1]) == ["read", "read"]
    old = time.time() - TURN_END_SECONDS - 60
    for path in tmp_path.glob("*/*/*.turn"):
        os.utime(path, (old, old))
    put(store, range(40, 60))
    assert get(store, [0]) == ["gone"]


def test_a_key_has_a_share_and_its_own_blocks_leave_first(tmp_path, opened):
    folder = open_folder(tmp_path, 40 * FILE, key_share=0.25)
    store = BlockStore(folder, MODEL, {"origins": []})
    put(store, range(20))
    put(store, range(100, 130), owner="key")
    counts = {}
    for block in folder.blocks():
        counts[block.owner] = counts.get(block.owner, 0) + 1
    assert counts == {folder.owner(""): 20, folder.owner("key"): pytest.approx(10, abs=1)}
    store.close(SECONDS)


def test_several_models_share_the_limit(tmp_path, opened):
    folder = open_folder(tmp_path, 30 * FILE)
    one, other = (BlockStore(folder, bytes([n] * 16), {"origins": []}) for n in (1, 2))
    put(one, range(30))
    put(other, range(20))
    assert sum(block.size for block in folder.blocks()) <= 30 * FILE
    assert get(other, range(20)) == ["read"] * 20
    assert get(one, [0]) == ["gone"]
    for each in (one, other):
        each.close(SECONDS)


def test_purge_prune_and_keys_that_are_gone(tmp_path, opened):
    store = opened(tmp_path)
    for owner in ("", "a", "b", "c"):
        put(store, range(3), owner)
    folder = store.folder
    assert folder.purge("a") == 3 * FILE
    assert folder.keep_owners({"", "b"}) == 3 * FILE
    assert get(store, [0], "b") == ["read"]
    assert get(store, [0], "a") == ["gone"]
    put(store, [9], "a")  # its folder is made again
    assert folder.prune() == 0
    (usage,) = folder.models()
    (usage.folder / "about.json").write_text(json.dumps({"origins": [["/gone", 1, 1]]}))
    assert folder.prune() == 7 * FILE
    put(store, [5])
    assert get(store, [5]) == ["read"]


def test_a_full_disk_pauses_writing_and_is_told_once(tmp_path, opened, monkeypatch, caplog):
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])
    put(store, [1])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(store_module, "write_block", full)
        put(store, [2, 3])
        assert not store.accepts(SIZE)
        now[0] += 31
        put(store, [4])
    assert caplog.text.count("takes no new blocks for now (No space left on device)") == 1
    assert get(store, [1]) == ["read"]
    now[0] += 31
    put(store, [5])
    assert store.accepts(SIZE)
    assert get(store, [5]) == ["read"]
    assert open_folder(tmp_path).recount() == {store.folder.owner(""): 2 * FILE}


def test_a_disk_without_room_takes_nothing(tmp_path, opened, monkeypatch, caplog):
    store = opened(tmp_path, FILE - 1)
    put(store, [1])
    assert "no room on its disk" in caplog.text
    assert not list(tmp_path.glob("*/*/*"))


def test_a_writer_that_stands_still_blocks_nobody(tmp_path, opened, monkeypatch):
    store = opened(tmp_path, queue_bytes=3 * SIZE)
    go, real = threading.Event(), store_module.write_block

    def slow(*args):
        assert go.wait(SECONDS)
        real(*args)

    monkeypatch.setattr(store_module, "write_block", slow)
    taken = 0
    while store.accepts(SIZE):
        data = store.take_buffer(SIZE)
        store.write(BlockWrite(address(store, taken), data, False, False))
        taken += 1
    assert taken == 3
    go.set()
    assert store.wait(SECONDS, lambda: store.has_written_all)
    assert store.num_blocks == 3


def test_a_close_waits_no_longer_than_it_may(tmp_path, monkeypatch):
    """A write and a read hang: the wait and both threads share one time."""
    release, waits = threading.Event(), []
    monkeypatch.setattr(store_module, "write_block", lambda *_: release.wait(SECONDS))
    monkeypatch.setattr(store_threads, "read_block", lambda *_: release.wait(SECONDS))
    store = open_store(tmp_path)
    store._files._is_turn_end[address(store, 1).digest] = False
    store.read([(address(store, 1), SIZE)])
    store.write(BlockWrite(address(store, 2), store.take_buffer(SIZE), has_quota=False, is_turn_end=False))
    for thread in store._threads:
        monkeypatch.setattr(thread, "join", waits.append)
    store.close(0.05)
    release.set()
    assert waits == [0.0, 0.0]


def test_a_read_that_hangs_keeps_others_from_waiting(tmp_path, opened, monkeypatch):
    now = [0.0]
    store = opened(tmp_path, clock=lambda: now[0])
    put(store, [1])
    go, reading = threading.Event(), threading.Event()

    def hang(*_):
        reading.set()
        assert go.wait(SECONDS)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_threads, "read_block", hang)
    job = store.read([(address(store, 1), SIZE)])
    assert reading.wait(SECONDS)
    assert not store.is_stalled
    now[0] = 2.0
    assert store.is_stalled
    go.set()
    assert store.wait(SECONDS, lambda: job.is_ended)
    assert not store.is_stalled
    assert store.counters.damaged == 1


@pytest.mark.parametrize("text", ["2\n", "17"])
def test_a_newer_folder_is_refused_and_left_alone(tmp_path, text, opened):
    put(opened(tmp_path), [1])
    (tmp_path / "format").write_text(text)
    with pytest.raises(KVFolderUnusable, match="newer llmbox"):
        open_folder(tmp_path)
    assert len(list(tmp_path.glob("*/*/*"))) == 1


@pytest.mark.parametrize("lost", ["format", "secret"])
def test_a_folder_without_its_format_or_secret_begins_anew(tmp_path, lost, opened):
    put(opened(tmp_path), [1])
    (tmp_path / lost).unlink()
    store = opened(tmp_path)
    assert store.num_blocks == 0
    assert not list(tmp_path.glob("*/*/*"))


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVFolderUnusable, match="cannot be used"):
        open_folder(tmp_path / "file" / "kv")
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(KVFolderUnusable, match="others can write"):
        open_folder(tmp_path / "open")
    monkeypatch.setattr("llmbox.engine.kv_store.folder.filesystem_of", lambda _: "nfs4")
    with pytest.raises(KVFolderUnusable, match=r"network disk \(nfs4\)"):
        open_folder(tmp_path / "kv")


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("1")
    with pytest.raises(KVFolderUnusable, match=r"holds other files \(photos\)"):
        open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize("lost", ["format", "secret", None])
def test_folders_beside_those_of_models_are_never_removed(tmp_path, lost, opened):
    put(opened(tmp_path), [1])
    others = [tmp_path / "photos" / "of" / "me.part", tmp_path / ("F" * 32) / "x" / "y"]
    for other in others:
        other.parent.mkdir(parents=True)
        other.write_text("1")
        os.utime(other, (1, 1))
    if lost:
        (tmp_path / lost).unlink()
    folder = open_folder(tmp_path)
    folder.keep_owners([])
    folder.prune(everything=True)
    assert not folder.models()
    assert all(other.exists() for other in others)


@pytest.mark.parametrize("torn", ["", "0", "\0" * 21, "x\n"])
def test_usage_that_a_crash_tore_is_counted_anew(tmp_path, torn, opened):
    store = opened(tmp_path, 10 * FILE)
    put(store, range(10))
    (tmp_path / "usage").write_text(torn)
    put(store, [10])
    used = sum(path.stat().st_size for path in tmp_path.glob("*/*/*"))
    assert 9 * FILE <= used <= 10 * FILE
    assert int((tmp_path / "usage").read_text()) == used


@pytest.mark.parametrize("free", [-3 * FILE, -1])
def test_wrong_usage_on_a_full_disk_evicts_what_one_block_needs(tmp_path, opened, monkeypatch, free):
    store = opened(tmp_path)
    put(store, range(20))
    (tmp_path / "usage").write_text("0\n")
    monkeypatch.setattr(KVFolder, "_room", lambda _, usage: usage + free)
    store.folder.reserve(FILE)
    assert 15 <= len(store.folder.blocks()) < 20


def test_a_disk_that_others_filled_costs_no_block(tmp_path, opened, monkeypatch):
    store = opened(tmp_path)
    put(store, range(5))
    monkeypatch.setattr(KVFolder, "_room", lambda _, usage: usage - 100 * FILE)
    assert not store.folder.reserve(FILE)
    assert len(store.folder.blocks()) == 5


def test_a_lock_that_is_never_released_is_an_error(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    monkeypatch.setattr("llmbox.engine.kv_store.usage.LOCK_SECONDS", 0.05)
    with UsageFile.locked(tmp_path / "usage"), pytest.raises(OSError, match="keeps it locked"):
        folder.recount()
    assert folder.recount() == {}


def test_one_daemon_has_the_folder(tmp_path):
    claim = open_folder(tmp_path).claim()
    with pytest.raises(KVFolderUnusable, match="another daemon"):
        open_folder(tmp_path).claim()
    os.close(claim)
    os.close(open_folder(tmp_path).claim())


def test_file_systems_are_read_from_mounts(tmp_path):
    mounts = tmp_path / "mounts"
    where = tmp_path / "far away"
    escaped = str(where).replace(" ", "\\040")
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nhost:/x {escaped} nfs4 rw 0 0\nbroken\n")
    assert filesystem_of(where / "kv", str(mounts)) == "nfs4"
    assert filesystem_of(tmp_path, str(mounts)) == "ext4"
    assert filesystem_of(tmp_path, str(tmp_path / "none")) == ""


def test_environment():
    told = usage.cache_variables(Path("/x"), 5, 0.5)
    assert usage.read_variables(told) == (Path("/x"), 5, 0.5)
    assert usage.read_variables({}) is None
    assert usage.read_variables(usage.cache_variables(Path("/x"), 0, 1.0)) is None


def test_unfinished_files_of_dead_writers_go(tmp_path, opened):
    put(opened(tmp_path), [1])
    (part,) = [path for path in tmp_path.glob("*/*") if path.is_dir()]
    left = part / "x.part"
    left.write_text("half")
    os.utime(left, (1, 1))
    KVFolder(tmp_path, 1000).prune()
    assert not left.exists()


@pytest.mark.parametrize("count", [300, nightly(10_000)])
def test_damaged_files_are_dropped_and_counted(tmp_path, opened, count):
    """A flipped byte, a cut file, a longer one, and a file of another block in its place: no byte is read."""
    rng = random.Random(count)
    put(opened(tmp_path), [1, 2])
    store = opened(tmp_path)
    path = store._files.path(address(store, 1))
    whole, other = path.read_bytes(), store._files.path(address(store, 2)).read_bytes()
    for number in range(1, count + 1):
        damaged = bytearray(whole)
        match rng.randrange(4):
            case 0:
                damaged[rng.randrange(FILE)] ^= rng.randrange(1, 256)
            case 1:
                del damaged[rng.randrange(FILE) :]
            case 2:
                damaged += rng.randbytes(rng.randrange(1, 64))
            case _:
                damaged[:] = other
        path.write_bytes(damaged)
        store._files.list()
        assert get(store, [1]) == ["damaged"]
        assert store.counters.damaged == number
        assert not path.exists()
    path.write_bytes(whole)
    store._files.list()
    assert get(store, [1, 2]) == ["read", "read"]
