"""Whatever the bytes are: a header that can be trusted, or a ModelError."""

import json
import struct
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbox.engine.checkpoint.safetensors import read_header
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
