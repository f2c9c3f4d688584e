"""A mixture of experts as `Ops.experts` takes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mixture:
    """Linears of one layer's experts: one for each, or one of all by `Ops.pack_experts`."""

    gate_ups: Sequence[Any]
    """[2 F, E], gate first."""
    downs: Sequence[Any]
    """[E, F]."""
    count: int
    per_token: int
    normalised: bool
    """Shares of the chosen experts are made to sum to one."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the KV cache of a model must hold. G kv heads of D numbers a token."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of the stored numbers; `compute_dtype` is the model's."""
    compute_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Sequence n owns rows `query_starts[n] .. query_starts[n + 1]` of every T-shaped tensor of the step.

    Its last row stands at position `context_lens[n] - 1`; the rows before it at the positions before.
    Position p of a sequence lives in block `block_tables[n, p // block_size]`, slot `p % block_size`.
    Tensors are contiguous int32 on the model's device, the lists say the same to Python.
    """

    block_size: int
    query_lens: Sequence[int]
    contexts: Sequence[int]
    query_starts_N1: Tensor
    context_lens_N: Tensor
    block_tables_NB: Tensor
    """Entries past a sequence's last block are 0 and must not be read as blocks."""
    positions_T: Tensor
    slots_T: Tensor
    """`block * block_size + offset` of each row: where its key and value go."""
