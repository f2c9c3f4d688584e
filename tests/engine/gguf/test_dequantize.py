"""ggml's formats as floats, beside the library of those who made them."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from llmbox.engine.gguf.dequantize import dequantise
from llmbox.engine.gguf.reader import BLOCKS

SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has numbers of 16 bits, which any bytes may not be."""


@pytest.mark.parametrize("kind", SCALES)
def test_the_same_bits(kind: str) -> None:
    noise = np.random.default_rng(3)
    raw = noise.integers(0, 256, (77, BLOCKS[kind][1]), dtype=np.uint8)
    for at in SCALES[kind]:
        raw[:, at : at + 2] = noise.normal(size=(77, 1)).astype(np.float16).view(np.uint8)
    wanted = dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(dequantise(kind, torch.from_numpy(raw)).numpy(), wanted)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("kind", DTYPES)
def test_floats(kind: str) -> None:
    dtype = DTYPES[kind]
    values = torch.randn(123).to(dtype)
    assert torch.equal(dequantise(kind, values.view(torch.uint8)), values.float())


def test_all_formats_are_covered() -> None:
    assert set(BLOCKS) == {*SCALES, "F32", "F16", "BF16"}
    sizes = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in BLOCKS}
    assert sizes == BLOCKS
