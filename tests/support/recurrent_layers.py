"""Recurrent layers on their own: operations with their weights, layouts of steps, state of no content."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout, StateLayout
from llmbox.kernels.ops import Ops
from llmbox.kernels.recurrent import RecurrentState, ScanShape, ScanWeights, StateShape, make_state

SLOTS = 7
SHAPES = {
    "delta": ScanShape("delta", heads=4, key_heads=2, key_dim=24, value_dim=40, beta=2.0),
    "kda": ScanShape("kda", heads=4, key_heads=4, key_dim=24, value_dim=24),
    "kda bounded": ScanShape("kda", heads=4, key_heads=4, key_dim=24, value_dim=24, limits=(-5.0, 1.0)),
    "ssm": ScanShape("ssm", heads=4, key_heads=2, key_dim=16, value_dim=72, limits=(0.01, 1.5)),
    "s6": ScanShape("s6", heads=3, key_heads=1, key_dim=16, value_dim=40),
}


def layout_of(
    spans: Sequence[tuple[int, int]],
    slots: Sequence[int],
    saves: Sequence[dict[int, int]] | None = None,
    device: torch.device | str = "cpu",
) -> BatchLayout:
    """Positions (start, end) of each sequence; saves: {position after which to save: slot}."""

    def int32(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=device)

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
    shapes: dict[str, ScanShape] | None = None
    channels: int = 52
    seed: int = 3
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.weight = self.randn(4, self.channels)
        self.bias = self.randn(self.channels)
        self.shape = shape = (self.shapes or SHAPES).get(self.kind, SHAPES["delta"])
        heads, decays, values = shape.heads, shape.heads * shape.key_dim, shape.heads * shape.value_dim
        kind = self.shape.rule
        gates = {"ssm": heads, "kda": heads + decays, "s6": values + 2 * shape.key_dim}
        self.gates = gates.get(kind, 2 * heads)
        skips = {"ssm": heads, "s6": values}
        skip = self.randn(skips[kind]) if kind in skips else None
        bias = self.randn({"kda": decays, "s6": values}.get(kind, heads))
        rates = (heads, shape.key_dim, shape.value_dim) if kind == "s6" else (heads,)
        self.weights = ScanWeights(-self.randn(*rates).exp(), bias, skip)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    @property
    def state_shape(self) -> StateShape:
        shape = self.shape
        sizes = (0, 0, 0) if self.is_conv else (shape.heads, shape.key_dim, shape.value_dim)
        return StateShape(2, SLOTS, self.channels, 4, *sizes)

    @property
    def is_conv(self) -> bool:
        return self.kind.startswith("conv")

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        width = {"conv": self.channels, "conv gated": 3 * self.channels}.get(self.kind, self.shape.width)
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


def fresh_state(layer: Layer, shape: StateShape | None = None) -> RecurrentState:
    """Full of what nobody may read."""
    state = make_state(shape or layer.state_shape, torch.device(layer.device))
    for tensor in state.tensors:
        tensor.fill_(float("nan"))
    return state
