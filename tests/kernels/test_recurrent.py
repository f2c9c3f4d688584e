"""Recurrent layers: every backend against the reference, and the same bits however the rows are cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbox.kernels.dispatch import backends, select_ops
from llmbox.kernels.op_types import BatchLayout, StateLayout
from llmbox.kernels.ops import Ops
from llmbox.kernels.recurrent import (
    RecurrentState,
    ScanShape,
    ScanWeights,
    StateShape,
    copy_states,
    make_state,
)
from llmbox.kernels.reference import REFERENCE

CPU = torch.device("cpu")
SLOTS = 7
DELTA = ScanShape("delta", heads=4, key_heads=2, key_dim=24, value_dim=40, beta=2.0)
KDA = ScanShape("kda", heads=4, key_heads=4, key_dim=24, value_dim=24)
SSM = ScanShape("ssm", heads=4, key_heads=2, key_dim=16, value_dim=72, limits=(0.01, 1.5))
NATIVE = [name for name in backends() if name.startswith("cpu")]


def layout_of(
    spans: Sequence[tuple[int, int]], slots: Sequence[int], saves: Sequence[dict[int, int]] | None = None
) -> BatchLayout:
    """Positions (start, end) of each sequence; saves: {position after which to save: slot}."""

    def int32(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32)

    starts, rows, targets, save_starts = [0], list[int](), list[int](), [0]
    for n, (start, end) in enumerate(spans):
        for position, slot in (saves[n] if saves else {}).items():
            rows.append(starts[-1] + position - 1 - start)
            targets.append(slot)
        starts.append(starts[-1] + end - start)
        save_starts.append(len(rows))
    return BatchLayout(
        block_size=16,
        query_lens=[end - start for start, end in spans],
        contexts=[end for _, end in spans],
        query_starts_N1=int32(starts),
        context_lens_N=int32([end for _, end in spans]),
        block_tables_NB=int32([0] * len(spans)).view(-1, 1),
        positions_T=int32([p for span in spans for p in range(*span)]),
        slots_T=int32([0] * starts[-1]),
        states=StateLayout(int32(slots), int32(save_starts), int32(rows), int32(targets)),
    )


@dataclass
class Layer:
    """One operation with its weights; `apply` runs it over rows of (inputs, gates)."""

    kind: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.weight = self.randn(4, 52)
        self.bias = self.randn(52)
        self.shape = {"ssm": SSM, "kda": KDA}.get(self.kind, DELTA)
        self.gates = {"ssm": 4, "kda": 4 + 4 * 24}.get(self.kind, 8)
        skip = self.randn(4) if self.kind == "ssm" else None
        bias = self.randn(4 * 24 if self.kind == "kda" else 4)
        self.weights = ScanWeights(-self.randn(4).exp(), bias, skip)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    @property
    def state_shape(self) -> StateShape:
        heads, key, value = (0, 0, 0) if self.is_conv else (4, self.shape.key_dim, self.shape.value_dim)
        return StateShape(2, SLOTS, 52, 4, heads, key, value)

    @property
    def is_conv(self) -> bool:
        return self.kind.startswith("conv")

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        width = {"conv": 52, "conv gated": 156}.get(self.kind, self.shape.width)
        gates = self.randn(count, self.gates)
        return self.randn(count, width).to(self.dtype), gates.to(self.dtype)

    def apply(self, ops: Ops, rows: Any, gates: Any, state: RecurrentState, layout: BatchLayout) -> Tensor:
        recurrent = ops.recurrent
        assert recurrent is not None
        if self.is_conv:
            gated = self.kind == "conv gated"
            bias = None if gated else self.bias
            return recurrent.short_conv(rows, self.weight, bias, gated, state, 1, layout).clone()
        return recurrent.scan(rows, gates, self.weights, self.shape, state, 1, layout).clone()


def fresh_state(layer: Layer) -> RecurrentState:
    """Full of what nobody may read."""
    state = make_state(layer.state_shape, CPU)
    for tensor in state.tensors:
        tensor.fill_(float("nan"))
    return state


KINDS = pytest.mark.parametrize("kind", ["conv", "conv gated", "delta", "ssm", "kda"])
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
    for gate_by in ("sigmoid_mul", "silu_mul"):
        exact = getattr(REFERENCE.recurrent, gate_by)(flat, wide)
        torch.testing.assert_close(getattr(ops.recurrent, gate_by)(flat.clone(), wide), exact, **close)
    by, added = layer.randn(60), layer.randn(5, 60).to(dtype)
    for more in (None, added):
        exact = REFERENCE.recurrent.mul_add(wide, by, more)
        torch.testing.assert_close(ops.recurrent.mul_add(wide, by, more), exact, **close)
    torch.testing.assert_close(ops.gate_mul(flat.clone(), "relu2"), flat.relu() ** 2, **close)
