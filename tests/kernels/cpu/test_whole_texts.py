"""Attention in both directions on the C++ kernels: torch's results, whatever the lengths and the threads."""

import pytest
import torch
from torch.nn import functional

from llmbox.kernels.cpu import attention
from llmbox.kernels.dispatch import select_ops

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [[1], [700], [36, 36, 12, 4, 24], [64] * 9 + [3], [31, 33, 290]])
@pytest.mark.parametrize("heads", [(4, 4, 18), (6, 2, 80)])
def test_results_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, lens: list[int], heads: tuple[int, int, int]
) -> None:
    queries, kv_heads, width = heads
    torch.manual_seed(0)
    rows = torch.randn(sum(lens), queries + 2 * kv_heads, width).to(dtype)
    q, k, v = torch.split(rows, [queries, kv_heads, kv_heads], dim=1)
    found = []
    for threads in (1, 2):
        attend = select_ops(CPU, dtype, threads=threads).attend_whole_texts
        assert attend is not None
        found.append(torch.cat(list(attend(q, k, v, lens, 0.3))))
    assert torch.equal(*found)
    exact = []
    for parts in zip(*(torch.split(each.float(), lens) for each in (q, k, v)), strict=True):
        result = functional.scaled_dot_product_attention(
            *(each.transpose(0, 1) for each in parts), scale=0.3, enable_gqa=True
        )
        exact.append(result.transpose(0, 1).flatten(1))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[0].float(), torch.cat(exact), rtol=tolerance, atol=tolerance)
    # A text has the same bits beside others.
    alone = torch.cat(list(attend(*(each[: lens[0]] for each in (q, k, v)), lens[:1], 0.3)))
    assert torch.equal(alone, found[0][: lens[0]])
    # And in pieces.
    monkeypatch.setattr(attention, "_PAIRS", 40 * max(lens))
    pieces = list(attend(q, k, v, lens, 0.3))
    assert len(pieces) >= sum(lens) // 64
    assert torch.equal(torch.cat(pieces), found[0])
