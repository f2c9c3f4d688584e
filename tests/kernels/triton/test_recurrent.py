"""Triton's recurrent layers, against the reference, and bit by bit however the rows of a sequence are cut."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from gpu.checks import LIMIT, distance
from llmbox.kernels.recurrent import ScanShape, copy_states
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.recurrent.chunked_scan import chunked_scan
from support.numbers import TOLERANCE
from support.recurrent_layers import Layer, fresh_state, layout_of

CPU = torch.device("cpu")
SHAPES = {
    "delta": ScanShape("delta", heads=2, key_heads=1, key_dim=12, value_dim=20, beta=2.0),
    "kda": ScanShape("kda", heads=1, key_heads=1, key_dim=12, value_dim=12),
    "kda bounded": ScanShape("kda", heads=1, key_heads=1, key_dim=12, value_dim=12, limits=(-5.0, 1.0)),
    "ssm": ScanShape("ssm", heads=2, key_heads=1, key_dim=8, value_dim=12, limits=(0.01, 1.5)),
    "s6": ScanShape("s6", heads=2, key_heads=1, key_dim=8, value_dim=12),
}
KINDS = pytest.mark.parametrize("kind", ["conv", "conv gated", *SHAPES])
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of masked slots


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Prompts beside each other, decoding, a step that goes on from a saved state, rows that fill up."""
    layer, ops = Layer(kind, dtype, SHAPES), triton_ops(CPU, dtype, deterministic=True)
    steps = [
        layout_of([(0, 6), (0, 1)], [3, 0], [{2: 1, 6: 6}, {}]),
        layout_of([(6, 7), (1, 2), (0, 1)], [3, 0, -1], [{7: 2}, {2: -1}, {}]),
        layout_of([(2, 3), (0, 2)], [1, 4]),
    ]
    ours, theirs = fresh_state(layer), fresh_state(layer)
    for layout in steps:
        rows, gates = layer.rows(int(layout.query_starts_N1[-1]))
        exact = layer.apply(REFERENCE, rows, gates, theirs, layout)
        torch.testing.assert_close(layer.apply(ops, rows, gates, ours, layout), exact, **TOLERANCE[dtype])
        for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4, equal_nan=True)
            assert mine[0].isnan().all(), "another layer's state"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("delta", torch.float16),
        ("kda", torch.float32),
        ("kda bounded", torch.float32),
        ("ssm", torch.float16),
    ],
)
def test_prompts_chunk_by_chunk(kind: str, dtype: torch.dtype) -> None:
    """Whole chunks and parts of some, from a state in the middle of one too; a state saved at an end."""
    layer, ops = Layer(kind, dtype, SHAPES), triton_ops(CPU, dtype)
    assert ops.recurrent is not None
    ops = replace(ops, recurrent=replace(ops.recurrent, scan=chunked_scan))
    steps = [
        layout_of([(0, 20), (0, 1)], [3, 0], [{16: 1}, {}]),
        layout_of([(20, 21), (16, 18), (0, 2)], [3, 1, -1]),
    ]
    ours, theirs = fresh_state(layer), fresh_state(layer)
    for layout in steps:
        rows, gates = layer.rows(int(layout.query_starts_N1[-1]))
        exact = layer.apply(REFERENCE, rows, gates, theirs, layout)
        assert distance(layer.apply(ops, rows, gates, ours, layout), exact) < LIMIT[dtype]
        written = (state.memory_LSHAB[1, [0, 1, 3]] for state in (ours, theirs))
        assert distance(*written) < LIMIT[dtype]
        for slots in (ours.memory_LSHAB[0], ours.memory_LSHAB[1, [2, 4, 5, 6]]):
            assert slots.isnan().all(), "written beside its place"


def test_prompts_of_models_in_16_bits_go_by_chunks() -> None:
    """But not with --deterministic, nor where blocks, and so saved states, end within chunks, nor Mamba 1."""
    with mock.patch("llmbox.kernels.triton.recurrent.chunked_scan") as by_chunks:
        for kind, fixed, dtype, end, block_size in (
            ("delta", False, torch.float16, 2, 16),
            ("delta", True, torch.float16, 2, 16),
            ("delta", False, torch.float32, 2, 16),
            ("delta", False, torch.float16, 1, 16),
            ("delta", False, torch.float16, 2, 8),
            ("s6", False, torch.float16, 2, 16),
        ):
            layer = Layer(kind, torch.float16, SHAPES)
            rows, gates = (each.to(dtype) for each in layer.rows(end))
            layout = replace(layout_of([(0, end)], [0]), block_size=block_size)
            ops = triton_ops(CPU, dtype, deterministic=fixed)
            layer.apply(ops, rows, gates, fresh_state(layer), layout)
    assert by_chunks.call_count == 1


@KINDS
def test_chunks_batches_and_saved_states_change_no_bit(kind: str) -> None:
    layer, ops = Layer(kind, torch.float32, SHAPES), triton_ops(CPU, torch.float32, deterministic=True)
    rows, gates = layer.rows(12)
    whole = fresh_state(layer)
    expected = layer.apply(ops, rows, gates, whole, layout_of([(0, 12)], [2], [{5: 4, 12: 0}]))
    cut, found, start = fresh_state(layer), [], 0
    for end in (1, 3, 5, 6, 12):
        beside, beside_gates = layer.rows(2)
        layout = layout_of([(0, 2), (start, end)], [6, 2])
        both = torch.cat((beside, rows[start:end])), torch.cat((beside_gates, gates[start:end]))
        found.append(layer.apply(ops, *both, cut, layout)[2:])
        start = end
    assert torch.equal(torch.cat(found), expected)
    copy_states(whole, [(4, 5)])
    again = layer.apply(ops, rows[5:], gates[5:], whole, layout_of([(5, 12)], [5]))
    assert torch.equal(again, expected[5:])
    for tensor in whole.tensors:
        torch.testing.assert_close(tensor[1, 5], tensor[1, 0], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates(dtype: torch.dtype) -> None:
    ours, theirs = triton_ops(CPU, dtype).recurrent, REFERENCE.recurrent
    assert ours is not None
    assert theirs is not None
    layer = Layer("conv", dtype)
    x, gate = layer.randn(3, 3, 20).to(dtype), layer.randn(3, 6, 20).to(dtype)[:, 3:]
    for norm_first in (True, False):
        arguments = x, gate, layer.randn(3, 20), 1e-5, norm_first
        exact = theirs.gated_norm(*arguments)
        torch.testing.assert_close(ours.gated_norm(*arguments), exact, **TOLERANCE[dtype])
    flat, wide = x.flatten(1), layer.randn(3, 100).to(dtype)[:, 40:]
    before = flat.clone()
    for name in ("sigmoid_mul", "silu_mul", "softplus_mul"):
        exact = getattr(theirs, name)(flat, wide)
        torch.testing.assert_close(getattr(ours, name)(flat, wide), exact, **TOLERANCE[dtype])
    assert torch.equal(flat, before), "8-bit rows may be known of it"
    by, added = layer.randn(60), layer.randn(3, 60).to(dtype)
    for more in (None, added):
        exact = theirs.mul_add(wide, by, more)
        torch.testing.assert_close(ours.mul_add(wide, by, more), exact, **TOLERANCE[dtype])
    heads = x.view(3, 3, 4, 5)
    swapped = heads.transpose(1, 2).flatten(1)
    torch.testing.assert_close(ours.swap_heads(heads), swapped, atol=0, rtol=0)
