"""Tensors that stack several linears are cut where config.json says, their scales with them."""

from pathlib import Path

import pytest

from llmbox.engine.checkpoint.safetensors import TensorEntry
from llmbox.engine.checkpoint.tensor_io import split_rows
from llmbox.engine.errors import ModelError

PARTS = {"q": 256, "k": 128, "v": 128}


def entry(*shape: int, dtype: str = "BF16", width: int = 2) -> TensorEntry:
    size = width
    for side in shape:
        size *= side
    return TensorEntry(Path("model.safetensors"), "qkv_proj.weight", dtype, shape, 1000, size)


def test_parts_lie_one_after_another() -> None:
    found = split_rows(entry(512, 64), PARTS)
    places = {name: (part.shape, part.offset, part.nbytes) for name, part in found.items()}
    assert places == {
        "q": ((256, 64), 1000, 256 * 128),
        "k": ((128, 64), 1000 + 256 * 128, 128 * 128),
        "v": ((128, 64), 1000 + 384 * 128, 128 * 128),
    }


def test_scales_of_blocks_are_cut_between_blocks() -> None:
    found = split_rows(entry(4, 2, dtype="F32", width=4), PARTS)
    assert [(part.shape, part.offset) for part in found.values()] == [
        ((2, 2), 1000),
        ((1, 2), 1016),
        ((1, 2), 1024),
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_is_that_of_all_parts(shape: tuple[int, ...]) -> None:
    one = entry(*shape, dtype="F32", width=4)
    assert split_rows(one, PARTS) == dict.fromkeys(PARTS, one)


def test_other_rows_are_refused() -> None:
    with pytest.raises(ModelError, match=r"qkv_proj.weight. of shape \[511, 64\] .* 256, 128, 128 rows"):
        split_rows(entry(511, 64), PARTS)
