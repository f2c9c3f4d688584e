"""Whatever the bytes are: a header that can be trusted, or a ModelError."""

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbox.engine.checkpoint.index import ExpectedTensors
from llmbox.engine.checkpoint.safetensors import MAX_TENSORS, TensorEntry, entries_of, read_header
from llmbox.engine.errors import ModelError
from support.lanes import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", ""]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-4, 80), min_size=2, max_size=2) | JSON,
    }
)
HEADER = st.dictionaries(st.sampled_from(["a", "b.weight", "../c", "__metadata__"]) | st.text(), ENTRY | JSON)
RELAXED = settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    try:
        entries = read_header(file)
    except ModelError:
        return
    assert entries
    for entry in entries.values():
        assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(content)


@RELAXED
@given(content=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    check(tmp_path / "x.safetensors", content)


@RELAXED
@given(header=HEADER, data=st.integers(0, 80))
def test_any_header(tmp_path: Path, header: object, data: int) -> None:
    raw = json.dumps(header).encode()
    check(tmp_path / "x.safetensors", struct.pack("<Q", len(raw)) + raw + bytes(data))


def test_more_tensors_than_a_file_may_have(tmp_path: Path) -> None:
    header = {f"w{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(MAX_TENSORS + 1)}
    with pytest.raises(ModelError, match=r"names 262,145 tensors, at most 262,144 are read: save .* shards"):
        entries_of(tmp_path / "x.safetensors", header, 0, 0)


def test_shape_of_a_million_large_dimensions_is_not_multiplied(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [1 << 61] * 1_000_000, "data_offsets": [0, 4]}}
    raw = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    with pytest.raises(ModelError, match="bad shape") as found:
        read_header(tmp_path / "x.safetensors")
    assert len(str(found.value)) < 1000


def test_names_of_many_parts_take_memory_in_proportion_to_their_length(tmp_path: Path) -> None:
    names = ["a." * 200 + f"w{i}" for i in range(2000)]
    entries = {name: TensorEntry(tmp_path, name, "F32", (1,), 0, 4) for name in names}
    tracemalloc.start()
    expected = ExpectedTensors("", entries, {}, is_quantized=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # 80 MB with a list for each module

    assert expected.has("a.a")
    assert not expected.has("a.w0")
    expected.take_all("a")
    assert not expected.left
