"""The header of a GGUF file: what is read, and what is refused in words."""

import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.config import config_of
from llmbox.engine.gguf.folder import ROWS_FILE, find_matrix, write_folder
from llmbox.engine.gguf.reader import GgufFile, is_gguf, read_gguf
from llmbox.engine.gguf.tensors import read_rows
from support.gguf_models import write_gguf
from support.odd_files import KINDS, make_odd, no_hanging
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), arch="qwen3")


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q6_K", "IQ2_XS"])
def test_rows_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    source = make_tiny_model(tmp_path / "model", arch="qwen3", hidden_size=256)
    file = write_gguf(source, tmp_path / "t.gguf", kind)
    stored = next(each for each in gguf.GGUFReader(file).tensors if each.name == "output.weight")
    wanted = gguf.dequantize(stored.data, stored.tensor_type)
    (folder := tmp_path / "folder").mkdir()
    write_folder(read_gguf(file), folder)
    found = read_rows(asked := find_matrix(folder, "output.weight"), (7, 2))
    np.testing.assert_array_equal(np.array(found, np.float32), wanted[[7, 2]])
    one = replace(asked, shape=(256,), nbytes=asked.nbytes // 320)
    assert read_rows(one, (0,)) == [wanted[0].tolist()]
    others: tuple[dict[str, Any], ...] = (
        {"shape": (1, 1, 256)},
        {"dtype": "Q9"},
        {"file": Path("/none")},
    )
    for other in others:
        with pytest.raises(ModelError, match=r"rows that can be read|cannot be read"):
            read_rows(replace(asked, **other), (0,))
    with pytest.raises(ModelError, match=r"'cls\.output\.weight' is missing"):
        find_matrix(folder, "cls.output.weight")
    with pytest.raises(ModelError, match="321 are wanted"):
        read_rows(asked, (320,))


def test_rows_are_found_without_the_header_unless_the_file_has_changed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(file, moved := tmp_path / "t.gguf")
    (folder := tmp_path / "folder").mkdir()
    write_folder(read_gguf(moved), folder)
    headers: list[Path] = []

    def read(path: Path) -> GgufFile:
        headers.append(path)
        return read_gguf(path)

    monkeypatch.setattr("llmbox.engine.gguf.folder.read_gguf", read)
    asked = find_matrix(folder, "output.weight")
    assert not headers
    for damage in ("", "[]", "{}", '{"output.weight": 1}', '{"output.weight": {"stamp": 3}}'):
        (folder / ROWS_FILE).write_text(damage)
        assert find_matrix(folder, "output.weight") == asked
    moved.write_bytes(moved.read_bytes() + bytes(32))
    assert find_matrix(folder, "output.weight") == asked
    assert headers == [moved] * 6


@pytest.fixture(scope="module")
def file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")


def test_it_reads_what_the_library_reads(file: Path) -> None:
    wanted = gguf.GGUFReader(file)
    found = read_gguf(file)
    assert list(found.tensors) == [each.name for each in wanted.tensors]
    for each in wanted.tensors:
        entry = found.tensors[each.name]
        assert entry.dtype == each.tensor_type.name
        assert entry.shape == tuple(int(n) for n in each.shape[::-1])
        assert (entry.offset, entry.nbytes) == (each.data_offset, each.n_bytes)
    keys = {key for key in wanted.fields if not key.startswith("GGUF.")}
    assert set(found.metadata) == keys
    assert all(found.metadata[key] == wanted.fields[key].contents() for key in keys)
    assert found.architecture == "qwen3"
    assert is_gguf(file)


def test_parts_of_one_model(model: Path, file: Path, tmp_path: Path) -> None:
    first = write_gguf(model, tmp_path / "tiny.gguf", "Q8_0", parts=3)
    assert len(list(tmp_path.iterdir())) == 3
    whole, parts = read_gguf(file), read_gguf(first)
    assert set(parts.tensors) == set(whole.tensors)
    assert len({entry.file for entry in parts.tensors.values()}) == 3
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    with pytest.raises(ModelError, match="part 2 of 3: name the first one"):
        read_gguf(second)
    second.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf is missing"):
        read_gguf(first)
    with pytest.raises(ModelError, match=r"names must end in -00001-of-00003"):
        read_gguf(first.rename(tmp_path / "renamed.gguf"))


@pytest.mark.parametrize("key", ["split.count", "split.tensors.count"])
@pytest.mark.parametrize("value", [[1, 2], 2.0, -2, True])
def test_numbers_of_parts_of_another_kind_are_refused(tmp_path: Path, key: str, value: object) -> None:
    file = tmp_path / "tiny-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"{key} is .*, a whole number is needed"):
        read_gguf(file)


def test_no_such_file_and_no_such_format(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is missing"):
        read_gguf(tmp_path / "none.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf(other)
    assert not is_gguf(other)
    assert not is_gguf(tmp_path)
    cases = {
        struct.pack("<III", 1, 0, 0): "has version 1 of GGUF .* use a newer file",
        struct.pack("<IQQ", 4, 0, 0): "version 4 cannot be read, only 2 and 3",
        struct.pack(">IQQ", 3, 0, 0): "is big-endian, .* use a little-endian file",
    }
    for header, why in cases.items():
        other.write_bytes(b"GGUF" + header)
        with pytest.raises(ModelError, match=why):
            read_gguf(other)


def test_a_format_that_is_not_known_here(file: Path, tmp_path: Path) -> None:
    raw = file.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8  # behind its dimensions
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(raw[:at] + struct.pack("<I", 41) + raw[at + 4 :])
    with pytest.raises(
        ModelError,
        match=r"tensor 'blk.0.attn_q.weight' is Q1_0, which cannot be read; readable: F32, .*use another",
    ):
        read_gguf(broken)


@given(st.data())
def test_damaged_files_are_refused_in_words(file: Path, data: st.DataObject) -> None:
    """Cut anywhere, or with other bytes in the header: ModelError or another model, nothing else."""
    raw = file.read_bytes()
    header = min(entry.offset for entry in read_gguf(file).tensors.values())
    damaged = file.with_name("damaged.gguf")
    if data.draw(st.booleans()):
        damaged.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
        with pytest.raises(ModelError):
            read_gguf(damaged)
    else:
        at = data.draw(st.integers(0, header - 1))
        new = data.draw(st.binary(min_size=1, max_size=9))
        damaged.write_bytes(raw[:at] + new + raw[at + len(new) :])
        try:
            found = read_gguf(damaged)
            config_of(found)
        except ModelError:
            return
        assert all(entry.offset + entry.nbytes <= len(raw) for entry in found.tensors.values())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    make_odd(tmp_path / "x.gguf", kind)
    with no_hanging():
        assert not is_gguf(tmp_path / "x.gguf")
        with pytest.raises(ModelError, match=f"cannot be read: it is {kind}"):
            read_gguf(tmp_path / "x.gguf")
