"""Recurrent layers: every backend against the reference, and the same bits however the rows are cut."""

import pytest
import torch

from llmbox.kernels.dispatch import select_ops
from llmbox.kernels.recurrent import copy_states
from llmbox.kernels.reference import REFERENCE
from support.kernel_backends import backends
from support.recurrent_layers import Layer, fresh_state, layout_of

CPU = torch.device("cpu")
NATIVE = [name for name in backends() if name.startswith("cpu")]
KINDS = pytest.mark.parametrize("kind", ["conv", "conv gated", "delta", "ssm", "kda", "kda bounded", "s6"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@KINDS
@DTYPES
@pytest.mark.parametrize("name", NATIVE)
def test_as_the_reference(name: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", name)
    layer, ops = Layer(kind, dtype), select_ops(CPU, dtype)
    steps = [
        layout_of([(0, 9), (0, 1), (0, 30)], [3, 0, 5], [{4: 1, 8: 6}, {}, {30: 2}]),
        layout_of([(9, 10), (1, 2), (30, 37)], [3, 0, 5]),
        layout_of([(4, 6), (0, 3)], [1, 4]),  # goes on from a saved state
    ]
    ours, theirs = fresh_state(layer), fresh_state(layer)
    for layout in steps:
        rows, gates = layer.rows(int(layout.query_starts_N1[-1]))
        exact = layer.apply(REFERENCE, rows, gates, theirs, layout)
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            layer.apply(ops, rows, gates, ours, layout), exact, atol=tolerance, rtol=tolerance
        )
        for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
            torch.testing.assert_close(mine[1], other[1], atol=1e-4, rtol=1e-4, equal_nan=True)
            assert mine[0].isnan().all(), "another layer's state"


@KINDS
@pytest.mark.parametrize("name", NATIVE)
def test_chunks_batches_and_saved_states_change_no_bit(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", name)
    layer, ops = Layer(kind, torch.float32), select_ops(CPU, torch.float32)
    rows, gates = layer.rows(50)
    whole = fresh_state(layer)
    expected = layer.apply(ops, rows, gates, whole, layout_of([(0, 50)], [2], [{17: 4, 50: 0}]))

    cut, found, start = fresh_state(layer), [], 0
    for end in (1, 3, 17, 18, 33, 50):
        beside, beside_gates = layer.rows(5)
        layout = layout_of([(0, 5), (start, end)], [6, 2])
        both = torch.cat((beside, rows[start:end])), torch.cat((beside_gates, gates[start:end]))
        found.append(layer.apply(ops, *both, cut, layout)[5:])
        start = end
    assert torch.equal(torch.cat(found), expected)

    copy_states(whole, [(4, 5)])
    again = layer.apply(ops, rows[17:], gates[17:], whole, layout_of([(17, 50)], [5]))
    assert torch.equal(again, expected[17:])
    for tensor in whole.tensors:
        torch.testing.assert_close(tensor[1, 5], tensor[1, 0], atol=0, rtol=0, equal_nan=True)


@KINDS
@pytest.mark.parametrize("name", NATIVE)
def test_rows_without_a_slot_read_and_write_none(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such rows fill up a graph: negative numbers are no slots, to save to either."""
    monkeypatch.setenv("LLMBOX_KERNELS", name)
    layer, ops = Layer(kind, torch.float32), select_ops(CPU, torch.float32)
    rows, gates = layer.rows(8)
    layout = layout_of([(7, 8), (0, 5), (20, 22)], [-1, 2, -1], [{8: -1}, {}, {21: -1, 22: -1}])
    ours, theirs = fresh_state(layer), fresh_state(layer)
    before = [tensor.clone() for tensor in ours.tensors]
    seen = layer.apply(ops, rows, gates, ours, layout)
    exact = layer.apply(REFERENCE, rows, gates, theirs, layout)
    torch.testing.assert_close(seen, exact, atol=1e-4, rtol=1e-4)
    for tensor, first in zip(ours.tensors, before, strict=True):
        others = [slot for slot in range(tensor.shape[1]) if slot != 2]
        assert torch.equal(tensor[:, others].nan_to_num(7.0), first[:, others].nan_to_num(7.0))


@DTYPES
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", NATIVE)
def test_gates(name: str, dtype: torch.dtype, norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", name)
    ops = select_ops(CPU, dtype)
    assert ops.recurrent is not None
    assert REFERENCE.recurrent is not None
    layer = Layer("conv", dtype)
    x, gate = layer.randn(5, 3, 20).to(dtype), layer.randn(5, 6, 20).to(dtype)[:, 3:]
    weight = layer.randn(3, 20)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(
        ops.recurrent.gated_norm(x, gate, weight, 1e-5, norm_first),
        REFERENCE.recurrent.gated_norm(x, gate, weight, 1e-5, norm_first),
        **close,
    )
    flat, wide = x.flatten(1), layer.randn(5, 100).to(dtype)[:, 40:]
    for gate_by in ("sigmoid_mul", "silu_mul", "softplus_mul"):
        exact = getattr(REFERENCE.recurrent, gate_by)(flat, wide)
        torch.testing.assert_close(getattr(ops.recurrent, gate_by)(flat.clone(), wide), exact, **close)
    by, added = layer.randn(60), layer.randn(5, 60).to(dtype)
    for more in (None, added):
        exact = REFERENCE.recurrent.mul_add(wide, by, more)
        torch.testing.assert_close(ops.recurrent.mul_add(wide, by, more), exact, **close)
    heads = x.view(5, 3, 4, 5)
    swapped = heads.transpose(1, 2).flatten(1)
    torch.testing.assert_close(ops.recurrent.swap_heads(heads), swapped, atol=0, rtol=0)
    torch.testing.assert_close(ops.gate_mul(flat.clone(), "relu2"), flat.relu() ** 2, **close)
