"""Attention within whole texts, against torch text by text."""

from itertools import pairwise

import pytest
import torch

from llmbox.engine.model.encoder import attend
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.attention.text_attention import attend_texts
from support.numbers import assert_near

LENS = [1, 33, 16, 15, 70]


@pytest.mark.parametrize(
    ("heads", "width", "reach", "dtype"),
    [((4, 2), 16, None, torch.float32), ((2, 2), 24, 9, torch.float32), ((2, 1), 64, None, torch.float16)],
)
def test_texts(heads: tuple[int, int], width: int, reach: int | None, dtype: torch.dtype) -> None:
    """Rows of one stack of queries, keys and values; each text has the same bits alone."""
    rows = torch.randn(sum(LENS), heads[0] + 2 * heads[1], width).to(dtype)
    q, k, v = rows.split((heads[0], heads[1], heads[1]), 1)
    starts = torch.tensor([0, *LENS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    found = attend_texts(q, k, v, starts, width**-0.5, reach)
    exact = attend(REFERENCE, LENS, starts, *(x.double() for x in (q, k, v)), width**-0.5, reach)
    assert_near(found, exact)
    for start, end in list(pairwise(starts.tolist()))[1:3]:
        alone = starts.new_tensor([0, end - start])
        q_one, k_one, v_one = (x[start:end] for x in (q, k, v))
        assert torch.equal(attend_texts(q_one, k_one, v_one, alone, width**-0.5, reach), found[start:end])
