"""Recurrent state of sequences, and the operations on it: short convolutions, gated delta rule, Mamba.

Every sequence of a step has a slot. Its state after a row is a function of the rows up to it alone: each
backend goes through the rows one after another, so that chunks, batches and saved states change no bit.

T rows of the step, N sequences in it, S slots, L recurrent layers, C channels of the convolution, K inputs
that it spans, H heads (G of keys), A numbers of a key, B numbers of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .op_types import BatchLayout

ScanRule = Literal["delta", "ssm", "kda", "s6"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of the recurrent state on one rank. Without heads there is the convolution alone."""

    num_layers: int
    num_slots: int
    channels: int
    conv_width: int
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State of all slots, in float32. A sequence that begins at position 0 does not read its slot."""

    conv_LSKC: Tensor
    """The last K - 1 inputs of the convolution, the oldest first."""
    memory_LSHAB: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.conv_LSKC, self.memory_LSHAB


def make_state(shape: StateShape, device: torch.device) -> RecurrentState:
    """Allocate the state. It is not set: untouched pages of slots that are never used cost no memory."""
    at = shape.num_layers, shape.num_slots
    return RecurrentState(
        torch.empty(*at, shape.conv_width - 1, shape.channels, device=device),
        torch.empty(*at, shape.heads, shape.key_dim, shape.value_dim, device=device),
    )


def copy_states(state: RecurrentState, pairs: list[tuple[int, int]]) -> None:
    """Copy slots (source, destination) in all layers, one pair after another."""
    for source, destination in pairs:
        for tensor in state.tensors:
            tensor[:, destination].copy_(tensor[:, source])


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Heads of a scan. `rule` is one of

    delta   S = decay S + k (beta (v - (decay S)^T k))^T    decay = exp(rate softplus(a + bias)), beta =
            `beta` sigmoid(b); q and k are L2-normed. Rows are (q, k, v), gates (b, a)
    kda     the same with a decay for each number of a key (Kimi): a and bias are [G A], and G is H. Where the
            least limit is less than 0, decay = exp(least sigmoid(-rate (a + bias))) (Ling 3)
    ssm     S = decay S + k (dt v)^T    decay = exp(rate dt), dt = softplus(gate + bias) within `limits`.
            Rows are (v, k, q), gates dt; skip_H v is added to the result
    s6      the same with a decay for each number of the state and a dt for each value (Mamba 1): rate is
            [H A B], bias and skip are [H B]. Rows are v, gates (dt, k, q), and G is 1

    The result is S^T q, for the delta rules times 1 / sqrt(A). Head h reads keys and queries of h // (H / G).
    """

    rule: ScanRule
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    limits: tuple[float, float] = (0.0, float("inf"))
    beta: float = 1.0

    @property
    def width(self) -> int:
        """Numbers of a row."""
        keys = 0 if self.rule == "s6" else 2 * self.key_heads * self.key_dim
        return keys + self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """Parameters of a scan, float32."""

    rate_H: Tensor
    """The negative rate by which a time step decays: -exp(A_log); [H A B] for `s6`."""
    bias_H: Tensor
    """[G A] for `kda`, [H B] for `s6`."""
    skip_H: Tensor | None = None
    """Multiplier of a value that is added to its result; for `ssm`, and [H B] for `s6`."""


@dataclass(frozen=True, slots=True)
class RecurrentOps:
    """Operations of recurrent layers. `layer` counts the recurrent layers of the rank."""

    short_conv: Callable[[Tensor, Tensor, Tensor | None, bool, RecurrentState, int, BatchLayout], Tensor]
    """Causal convolution of each channel: (x, weight_KC, bias_C or None, gated, state, layer, layout) ->
    new tensor [T, C]. Weights and bias are float32.

    x is [T, C], and the result silu(conv(x)). Gated: x is (b, c, x) of [T, 3 C], and the result c conv(b x).
    """

    scan: Callable[[Tensor, Tensor, ScanWeights, ScanShape, RecurrentState, int, BatchLayout], Tensor]
    """Recurrence of `ScanShape.rule`: (rows [T, width], gates, weights, shape, state, layer, layout) -> new
    tensor [T, H B].
    """

    gated_norm: Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
    """(x_TnD, gate_TnD with strided rows, weight_nD, eps, norm_first) -> new tensor [T, n D]: over D,
    rms_norm(x) weight silu(gate) if `norm_first`, else rms_norm(x silu(gate)) weight.
    """

    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]
    """(x_TF, gate_TF with strided rows) -> x sigmoid(gate), in place or a new tensor."""

    silu_mul: Callable[[Tensor, Tensor], Tensor]
    """The same with x gate sigmoid(gate)."""

    softplus_mul: Callable[[Tensor, Tensor], Tensor]
    """The same with x log(1 + e^gate)."""

    mul_add: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x_TN with strided rows, by_N in float32, added_TN or None) -> x by + added, a new tensor or
    the one of `added`."""

    swap_heads: Callable[[Tensor], Tensor]
    """Heads x_TMND, contiguous -> new tensor [T, N M D]: those that come M by M, N by N."""
