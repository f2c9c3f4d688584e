"""Loading through packed weights on disk: the same tokens, and damage is only a slower load."""

import ctypes
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.checkpoint.tensor_io import bytes_of
from llmbox.engine.core.engine import Engine
from llmbox.engine.weights.packed_cache import file as packed_file
from llmbox.engine.weights.packed_cache import source as huge
from llmbox.engine.weights.packed_cache.cache import LIMIT_VARIABLE, cache_variables
from llmbox.kernels.dispatch import native_ready
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
PROMPT = list(range(5, 25))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repacked"
    for name, value in cache_variables(folder, 1.0).items():
        monkeypatch.setenv(name, value)
    return folder


def loaded(model: Path, **options: Any) -> Engine:
    """With what it had to pack written."""
    engine = load(model, **options)
    for thread in threading.enumerate():
        if thread.name == "keep packed weights":
            thread.join()
    return engine


def answer(engine: Engine) -> list[int]:
    return tokens(engine, [ask("a", PROMPT, 12)])["a"]


def refuse(*_: object) -> None:
    pytest.fail("the checkpoint was read")


@pytest.mark.parametrize(
    ("arch", "tied"),
    [("qwen2", False), ("qwen3", True), ("mixtral", False), ("phi3", True), ("gemma3_text", True)],
)
@pytest.mark.parametrize("quant", ["none", "int8", "int4-g128", "int4-mix"])
def test_the_second_load_reads_no_checkpoint_and_answers_the_same(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, quant: str, arch: str, tied: bool
) -> None:
    model = make_tiny_model(tmp_path / "model", arch=arch, tie_word_embeddings=tied)
    first = answer(loaded(model, quant=quant))
    monkeypatch.setattr("llmbox.engine.weights.checkpoint.Checkpoint.take_into", refuse)
    assert answer(loaded(model, quant=quant)) == first
    monkeypatch.undo()  # the environment too: from the checkpoint
    assert answer(load(model, quant=quant)) == first


def test_each_format_has_a_file_of_its_own(tmp_path: Path, kept: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    for options in ({}, {"quant": "int8"}, {"quant": "int4"}, {"dtype": "bfloat16"}, {}):
        loaded(model, **options)
    assert len(list(kept.glob("*.weights"))) == 4


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "another"])
def test_a_damaged_file_is_packed_again(tmp_path: Path, kept: Path, harm: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    first = answer(loaded(model, quant="int8"))
    (file,) = kept.glob("*.weights")
    good = file.read_bytes()
    bad = {
        "flip": bytes([good[0] ^ 1]) + good[1:],
        "cut": good[:-9],
        "empty": b"",
        "another": b"x" * len(good),
    }
    file.write_bytes(bad[harm])
    assert answer(loaded(model, quant="int8")) == first
    assert file.read_bytes() == good


def test_weights_that_the_model_does_not_ask_for_are_packed_again(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same key, and yet other contents: as after a change of the code that no layout tells."""
    model = make_tiny_model(tmp_path / "model")
    with monkeypatch.context() as before:
        before.setattr(
            "llmbox.engine.weights.source.WeightRequest.name", property(lambda asked: "/".join(asked.outputs))
        )
        first = answer(loaded(model))
    assert answer(loaded(model)) == first
    with monkeypatch.context() as after:
        after.setattr("llmbox.engine.weights.checkpoint.Checkpoint.take_into", refuse)
        assert answer(loaded(model)) == first


def test_a_checkpoint_that_changes_is_packed_anew(tmp_path: Path, kept: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    first = answer(loaded(model))
    make_tiny_model(tmp_path / "model", seed=2)
    assert answer(loaded(model)) != first
    assert len(list(kept.glob("*.weights"))) == 1  # the old ones are replaced


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, kept: Path) -> None:
    kept.write_text("in the way")
    assert len(answer(loaded(make_tiny_model(tmp_path / "model")))) == 12


def test_switched_off_by_zero(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    loaded(make_tiny_model(tmp_path / "model"))
    assert not kept.exists()


def test_small_pages_are_copied_into_huge_ones(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
    first = answer(loaded(model))
    monkeypatch.setattr(huge, "SMALL", 0)
    monkeypatch.setattr(huge, "small_ranges", lambda *_: None)
    monkeypatch.setattr(huge, "huge_share", lambda _: 0.0)
    assert answer(loaded(model)) == first


@pytest.mark.parametrize(("read_at", "copies"), [(0.7, True), (0.95, False), (1.2, False)])
def test_huge_pages_that_are_read_slowly_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_at: float, copies: bool
) -> None:
    def read_seconds(piece: torch.Tensor) -> float:
        old = begin <= piece.data_ptr() < begin + mapped.nbytes
        return 1 / read_at if old else 1.0

    mapped = torch.arange(70 << 20, dtype=torch.int64).to(torch.uint8)
    begin = mapped.data_ptr()
    monkeypatch.setattr(huge, "small_ranges", lambda *_: [])
    monkeypatch.setattr(huge, "_read_seconds", read_seconds)
    used, in_place = huge.in_huge_pages(mapped, tmp_path / "none")
    assert (used.data_ptr() != begin) == copies
    assert in_place == (0 if copies else mapped.nbytes)
    assert torch.equal(used, mapped)


def test_pages_that_were_found_fast_are_not_timed_again_until_the_machine_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: dict[tuple[Path, str], bytes] = {}

    def read(file: Path, name: str) -> bytes:
        if (file, name) not in notes:
            raise OSError
        return notes[file, name]

    speeds = [0.5, 0.95, 0.95]
    mapped = torch.zeros(70 << 20, dtype=torch.uint8)
    boot = tmp_path / "boot_id"
    boot.write_text("first")
    monkeypatch.setattr(packed_file, "_BOOT", boot)
    monkeypatch.setattr(huge, "small_ranges", lambda *_: [])
    monkeypatch.setattr(huge, "relative_speed", lambda _: speeds.pop(0))
    monkeypatch.setattr(huge.os, "getxattr", read)
    monkeypatch.setattr(huge.os, "setxattr", lambda file, name, value: notes.update({(file, name): value}))
    used = [huge.in_huge_pages(mapped, tmp_path / "a")[0].data_ptr() == mapped.data_ptr() for _ in range(3)]
    assert used == [False, True, True]
    assert speeds == [0.95]
    boot.write_text("second")
    huge.in_huge_pages(mapped, tmp_path / "a")
    assert speeds == []


def test_parts_in_small_pages_are_replaced_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = torch.randint(0, 255, (70 << 20,), dtype=torch.uint8)
    file = tmp_path / "weights"
    file.write_bytes(bytes(bytes_of(content)))
    with file.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    mapped = huge.read_only(memoryview(memory))
    first = -(-mapped.data_ptr() // (2 << 20)) * (2 << 20)
    small = [(first + (at << 20), first + (end << 20)) for at, end in ((2, 8), (20, 22), (60, 66))]
    monkeypatch.setattr(huge, "small_ranges", lambda *_: small)
    monkeypatch.setattr(huge, "is_noted", lambda *_: True)
    used, in_place = huge.in_huge_pages(mapped, file)
    assert used.data_ptr() == mapped.data_ptr()
    assert in_place == (70 - 14) << 20
    assert torch.equal(used, content)
    os.truncate(file, 0)  # what was replaced is no longer the file's
    for begin, end in small:
        at = begin - mapped.data_ptr()
        assert torch.equal(used[at : at + end - begin], content[at : at + end - begin])


def test_ranges_in_small_pages_end_where_huge_ones_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 2 << 20

    def ioctl(_pages: object, _number: int, asked: bytearray) -> int:
        _size, _flags, begin, end, _, regions, room, *_rest = huge._SCAN.unpack(asked)
        assert (begin, end, room) == (page, 10 * page, huge._REGIONS)
        found = [2 * page, 4 * page, huge._IS_HUGE, 7 * page, 9 * page, huge._IS_HUGE]
        (ctypes.c_uint64 * 6).from_address(regions)[:] = found
        return 2

    monkeypatch.setattr(huge.fcntl, "ioctl", ioctl)
    small = [(page, 2 * page), (4 * page, 7 * page), (9 * page, 10 * page)]
    assert huge.small_ranges(page - 4096, 9 * page + 8192) == small


def test_the_system_tells_small_pages_or_nothing() -> None:
    memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = bytes(len(memory))
    address = huge.read_only(memoryview(memory)).data_ptr()
    small = huge.small_ranges(address, len(memory))
    begin, end = -(-address // (2 << 20)) * (2 << 20), (address + len(memory)) // (2 << 20) * (2 << 20)
    assert small in (None, [(begin, end)])


def test_pieces_from_all_over_a_mapping_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []

    def read_seconds(piece: torch.Tensor) -> float:
        read.append((piece.data_ptr(), piece.nbytes))
        return 1.0

    mapped = torch.zeros(200 << 20, dtype=torch.uint8)
    monkeypatch.setattr(huge, "_read_seconds", read_seconds)
    assert huge.relative_speed(mapped) == 1.0
    pieces = [at - mapped.data_ptr() for at, size in read if size == 4 << 20][::2]
    assert pieces == sorted(set(pieces))
    assert pieces[0] == 0
    assert (200 << 20) * 0.9 < pieces[-1] + (4 << 20) <= 200 << 20


def test_a_copy_holds_the_same_bytes_at_a_huge_page() -> None:
    data = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8)
    for threads in (1, 2, 3):
        copy = huge.copy_to_huge_pages(data, threads)
        assert torch.equal(copy, data)
        assert copy.data_ptr() % (2 << 20) == 0
