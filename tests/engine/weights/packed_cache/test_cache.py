"""Packed weights on disk: found again, aged, and never in the way when something is wrong with them."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.weights.packed_cache import file as file_format
from llmbox.engine.weights.packed_cache.cache import PackedWeightCache, PackKey
from llmbox.engine.weights.packed_cache.file import (
    CHUNK,
    TRAILER,
    DamagedPackedFile,
    MappedWeights,
    PackedContent,
    read_index,
    write,
)
from support.lanes import examples
from support.tiny_models import make_tiny_model

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> PackedWeightCache:
    return PackedWeightCache(tmp_path / "repacked", GB)


def key_of(model: Path, **changes: object) -> PackKey:
    plain = PackKey(directory=model, dtype="torch.bfloat16", quant="int8", layout="avx512 1234")
    return replace(plain, **changes)  # type: ignore[arg-type]


def contents(*sizes: int) -> list[PackedContent]:
    return [
        PackedContent(f"item {n}", (size,), "linear", memoryview(os.urandom(size)))
        for n, size in enumerate(sizes)
    ]


def only_file(cache: PackedWeightCache) -> Path:
    (entry,) = cache.entries()
    return entry.path


# ------------------------------------------------------------------ found again


def test_everything_comes_back_as_it_was(cache: PackedWeightCache, model: Path) -> None:
    key, stored = key_of(model), contents(1, 4096, 70_000, CHUNK + 5, 0)
    assert cache.find(key) is None
    assert cache.store(key, stored)
    found = cache.find(key)
    assert found is not None
    for content in stored:
        item = found.item(content.name)
        assert item is not None
        assert (item.shape, item.dtype, item.offset % 4096) == (content.shape, "linear", 0)
        assert bytes(found.memory[item.offset :][: item.nbytes]) == bytes(content.data)
    (entry,) = cache.entries()
    assert entry.index is not None
    assert entry.index.model == str(model)
    assert entry.index.format == "int8 (torch.bfloat16), avx512"
    assert not entry.useless


def test_a_key_names_everything_that_matters(model: Path, tmp_path: Path) -> None:
    digests = {key_of(model).digest()}
    for change in (
        {"dtype": "torch.float32"},
        {"quant": "int4"},
        {"layout": "avx2 1234"},
        {"shard": "1 of 2, stage 1 of 1"},
    ):
        digests.add(key_of(model, **change).digest())
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    digests.add(key_of(copy).digest())
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    digests.add(key_of(model).digest())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    digests.add(key_of(model).digest())
    assert len(digests) == 8


def test_a_blob_of_the_hubs_cache_is_its_content(model: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    before = key_of(model).digest()
    os.utime(blob, ns=(0, 0))
    assert key_of(model).digest() == before


# ------------------------------------------------------------------ damage


def test_any_changed_or_missing_byte_is_noticed(cache: PackedWeightCache, model: Path) -> None:
    key, stored = key_of(model), contents(3000, 9000)
    cache.store(key, stored)
    file = only_file(cache)
    good = file.read_bytes()
    spots = [0, 2999, 4096, 13_000, 12_288, len(good) - TRAILER.size - 3, len(good) - TRAILER.size + 9]
    for spot in spots:
        broken = bytearray(good)
        broken[spot] ^= 0x10
        file.write_bytes(broken)
        assert cache.find(key) is None, spot
        assert not file.exists()
        assert cache.store(key, stored)
    for cut in (0, 5, 4096, len(good) - 1):
        file.write_bytes(good[:cut])
        assert cache.find(key) is None
    assert cache.store(key, stored)
    assert cache.find(key) is not None


def test_a_file_in_the_page_cache_is_verified_once_for_as_long_as_nobody_changes_it(
    cache: PackedWeightCache, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, compared = dict[str, bytes](), list[int]()
    boot = tmp_path / "boot_id"
    boot.write_text("first")
    monkeypatch.setattr(file_format, "_BOOT", boot)
    monkeypatch.setattr(os, "getxattr", lambda _file, name: notes[name] if name in notes else absent())
    monkeypatch.setattr(os, "setxattr", lambda _file, name, value: notes.update({name: value}))

    def absent() -> bytes:
        raise OSError

    def compare(data: memoryview, hashes: Sequence[int]) -> list[bool]:
        compared.append(len(hashes))
        return file_format_compare(data, hashes)

    file_format_compare = file_format._compare
    monkeypatch.setattr(file_format, "_compare", compare)
    monkeypatch.setattr(file_format, "_is_in_memory", lambda _: is_in_memory)
    is_in_memory = True
    key = key_of(model)
    cache.store(key, contents(3000, 9000))
    assert [cache.find(key) is not None and len(compared) for _ in range(3)] == [1, 1, 1]
    is_in_memory = False  # some of it came from the disk
    assert cache.find(key) is not None
    assert len(compared) == 2
    is_in_memory = True
    boot.write_text("second")
    assert [cache.find(key) is not None and len(compared) for _ in range(2)] == [3, 3]
    with only_file(cache).open("r+b") as file:
        file.write(b"changed")
    assert cache.find(key) is None
    assert len(compared) == 4


@settings(max_examples=examples(60))
@given(st.binary(max_size=300), st.booleans())
def test_a_foreign_file_is_an_error_and_no_crash(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, trailer: bool
) -> None:
    from xxhash import xxh3_64_intdigest

    path = tmp_path_factory.mktemp("foreign") / "file"
    path.write_bytes(
        junk + (TRAILER.pack(b"LLMBOXW1", len(junk), xxh3_64_intdigest(junk)) if trailer else b"")
    )
    with path.open("rb") as file, pytest.raises(DamagedPackedFile):
        read_index(file)


@pytest.mark.parametrize("change", [{"offset": -4096}, {"offset": 8192}, {"offset": 1}, {"nbytes": 10**12}])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    from xxhash import xxh3_64_intdigest

    path = tmp_path / "file"
    with path.open("wb", buffering=0) as out:
        write(out, contents(100), key="k", model="m", format="f", origins=())
    with path.open("rb") as file:
        index = read_index(file)
        MappedWeights(file, index)
    size = path.stat().st_size
    raw = path.read_bytes()
    text = json.loads(raw[index.data_bytes : size - TRAILER.size])
    text["items"][0] |= change
    changed = json.dumps(text).encode()
    trailer = TRAILER.pack(b"LLMBOXW1", len(changed), xxh3_64_intdigest(changed))
    path.write_bytes(raw[: index.data_bytes] + changed + trailer)
    with path.open("rb") as file, pytest.raises(DamagedPackedFile):
        read_index(file)


def test_weights_of_another_key_under_this_name_are_not_used(cache: PackedWeightCache, model: Path) -> None:
    cache.store(key_of(model, quant="int4"), contents(100))
    wanted = key_of(model)
    only_file(cache).rename(cache.folder / f"{wanted.digest()}.weights")
    assert cache.find(wanted) is None
    assert cache.entries() == []


# ------------------------------------------------------------------ room


def test_the_least_recently_used_leave_first(model: Path, tmp_path: Path) -> None:
    cache = PackedWeightCache(tmp_path / "repacked", 3_100_000)
    keys = [key_of(model, dtype=str(n)) for n in range(4)]
    for age, key in enumerate(keys[:3]):
        assert cache.store(key, contents(1_000_000))
        os.utime(cache.folder / f"{key.digest()}.weights", (age, age))
    assert cache.find(keys[0]) is not None  # now the youngest
    assert cache.store(keys[3], contents(1_000_000))
    assert [cache.find(key) is not None for key in keys] == [True, False, True, True]


def test_an_update_of_the_kernels_replaces_what_the_old_ones_packed(
    cache: PackedWeightCache, model: Path
) -> None:
    old, new = key_of(model, layout="avx512 old"), key_of(model, layout="avx512 new")
    other = key_of(model, layout="avx2 old")
    for key in (old, other, new):
        cache.store(key, contents(1000))
    assert [cache.find(key) is not None for key in (old, other, new)] == [False, True, True]


def test_useless_ones_leave_before_all_others(model: Path, tmp_path: Path) -> None:
    gone = make_tiny_model(tmp_path / "gone")
    cache = PackedWeightCache(tmp_path / "repacked", 2_100_000)
    cache.store(key_of(model), contents(1_000_000))
    os.utime(only_file(cache), (0, 0))
    cache.store(key_of(gone), contents(1_000_000))
    shutil.rmtree(gone)
    assert cache.store(key_of(model, quant="int4"), contents(1_000_000))
    assert cache.find(key_of(model)) is not None


def test_what_is_larger_than_allowed_is_not_kept(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PackedWeightCache(tmp_path / "repacked", 1_000_000)
    cache.store(key_of(model, quant="int4"), contents(10_000))
    assert not cache.store(key_of(model), contents(2_000_000))
    assert "cache.repacked_gb" in caplog.text
    assert len(cache.entries()) == 1


def test_the_disk_is_never_filled(
    cache: PackedWeightCache, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    almost_full = SimpleNamespace(total=100_000_000, used=94_990_000, free=5_010_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: almost_full)
    assert not cache.store(key_of(model), contents(20_000))
    assert "5% free" in caplog.text
    assert list(cache.folder.glob("*.weights")) == []


def test_a_disk_that_is_full_all_the_same_leaves_nothing(
    cache: PackedWeightCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert not cache.store(key_of(model), contents(20_000))
    assert {path.name for path in cache.folder.iterdir()} == {"lock"}


def test_a_checkpoint_that_changes_while_its_weights_are_written_is_not_kept(
    cache: PackedWeightCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(_handle: int) -> None:
        os.utime(model / "model.safetensors", ns=(0, 0))

    monkeypatch.setattr(os, "fsync", touched)
    cache.store(key_of(model), contents(20_000))
    assert cache.entries() == []


def test_without_a_folder_of_our_own_everything_works(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert not PackedWeightCache(blocked, GB).store(key_of(model), contents(10))
    assert PackedWeightCache(blocked, GB).find(key_of(model)) is None
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert not PackedWeightCache(shared, GB).store(key_of(model), contents(10))
    assert "chmod 700" in caplog.text


# ------------------------------------------------------------------ several at once


def test_many_writers_at_once_make_one_good_file(cache: PackedWeightCache, model: Path) -> None:
    key, stored = key_of(model), contents(300_000)
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(cache.store(key, stored))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 6
    assert cache.find(key) is not None


def test_what_a_killed_writer_left_is_swept_up(cache: PackedWeightCache, model: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from llmbox.engine.weights.packed_cache.cache import PackedWeightCache\n"
        "from llmbox.engine.weights.packed_cache.file import PackedContent\n"
        "from llmbox.engine.weights.packed_cache.cache import PackKey\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "key = PackKey(directory=Path(sys.argv[2]), dtype='d', quant='q', layout='l')\n"
        "content = PackedContent('a', (9,), 'd', memoryview(bytes(9)))\n"
        "PackedWeightCache(Path(sys.argv[1]), 10**9).store(key, [content])\n"
    )
    code = subprocess.run(
        [sys.executable, "-c", script, str(cache.folder), str(model)], check=False
    ).returncode
    assert code == -9
    assert [path.suffix for path in cache.folder.iterdir() if path.name != "lock"] == [".part"]
    assert cache.entries() == []
    assert cache.store(key_of(model), contents(10))
    assert not list(cache.folder.glob("*.part"))


def test_pruning(cache: PackedWeightCache, model: Path, tmp_path: Path) -> None:
    gone = make_tiny_model(tmp_path / "gone")
    cache.store(key_of(model), contents(100))
    cache.store(key_of(gone), contents(100))
    (cache.folder / "junk.weights").write_bytes(b"junk")
    shutil.rmtree(gone)
    assert cache.prune() > 100
    assert [entry.index.model for entry in cache.entries() if entry.index] == [str(model)]
    assert cache.prune(everything=True) > 100
    assert cache.entries() == []
    assert PackedWeightCache(tmp_path / "nowhere", GB).prune() == 0
