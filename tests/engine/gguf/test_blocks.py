"""ggml's formats as floats, beside the library of those who made them."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from llmbox.engine.gguf import blocks
from llmbox.engine.gguf.reader import BLOCKS
from support.gguf_models import SCALES, random_blocks


@pytest.mark.parametrize("kind", SCALES)
def test_the_same_bits(kind: str) -> None:
    raw = random_blocks(kind, 77)
    wanted = dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(blocks.dequantize(kind, torch.from_numpy(raw)).numpy(), wanted)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("kind", DTYPES)
def test_floats(kind: str) -> None:
    dtype = DTYPES[kind]
    values = torch.randn(123).to(dtype)
    assert torch.equal(blocks.dequantize(kind, values.view(torch.uint8)), values.float())


def test_all_formats_are_covered() -> None:
    assert set(BLOCKS) == {*SCALES, "F32", "F16", "BF16"}
    sizes = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in BLOCKS}
    assert sizes == BLOCKS
