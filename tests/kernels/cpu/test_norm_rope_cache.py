"""Norm, rotation and the write of keys and values in one pass: the same bits as three operations."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.op_types import BatchLayout, KVShape
from llmbox.kernels.ops import Ops
from support.kernel_backends import backends

BLOCK, QUERY_HEADS, KV_HEADS = 16, 6, 2
EPS = 1e-6


@pytest.fixture(params=[name for name in backends() if name.startswith("cpu ")])
def ops(request: pytest.FixtureRequest) -> Ops:
    backend = load_backend(request.param)
    backend.use_threads([0, 1, 0])
    return backend.ops()


def ragged(rows: int, slots: Sequence[int]) -> BatchLayout:
    def int32(numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    blocks = -(-rows // BLOCK)
    return BatchLayout(
        block_size=BLOCK,
        query_lens=[rows],
        contexts=[rows],
        query_starts_N1=int32([0, rows]),
        context_lens_N=int32([rows]),
        block_tables_NB=int32([list(range(blocks))]),
        positions_T=int32(list(range(rows))),
        slots_T=int32(slots),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (5, 10), (33, 64), (50, 34)])
@pytest.mark.parametrize("normed", ["by the model's dtype", "by float32", None])
def test_is_the_three_operations(
    ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype, rows: int, width: int, normed: str | None
) -> None:
    rotated = QUERY_HEADS + KV_HEADS
    qkv = torch.randn(rows, rotated + KV_HEADS, width).to(dtype)
    norm = torch.randn(rotated, width) if normed else None
    if norm is not None and normed != "by float32":
        norm = norm.to(dtype)
    cos, sin = torch.randn(2, rows, width // 2).repeat(1, 1, 2).unbind(0)
    sin = torch.cat((-sin[:, : width // 2], sin[:, width // 2 :]), 1)
    shape = KVShape(1, -(-rows // BLOCK), BLOCK, KV_HEADS, width, kv_dtype, dtype)

    def attend(fused: bool) -> tuple[Tensor, Tensor]:
        cache = ops.make_kv_cache(shape, torch.device("cpu"))
        ops.clear_blocks(cache, list(range(shape.num_blocks)))
        plan = ops.plan_attention(ragged(rows, range(rows)), cache, None)
        if fused:
            assert ops.rotate_and_write is not None
            q = ops.rotate_and_write(qkv.clone(), norm, EPS, cos, sin, cache, 0, plan)
        else:
            qk = qkv[:, :rotated] if norm is None else ops.rms_norm(qkv[:, :rotated], norm, EPS)
            qk = ops.rotary(qk.clone(), cos, sin)
            ops.write_kv(cache, 0, qk[:, QUERY_HEADS:], qkv[:, rotated:], plan)
            q = qk[:, :QUERY_HEADS]
        return q, ops.attention(q, cache, 0, plan, width**-0.5)

    for fused, apart in zip(attend(True), attend(False), strict=True):
        assert torch.equal(fused, apart)
