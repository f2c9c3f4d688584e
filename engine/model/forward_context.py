"""Inputs that every layer of one forward pass shares."""

from dataclasses import dataclass

from torch import Tensor

from llmbox.kernels.ops import AttentionPlan, KVCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Token ids, RoPE tables, KV cache and attention plans of a step of T rows.

    `kernels/ops.py` describes the layout of cos and sin.
    """

    ids_T: Tensor
    cos_ATD: Tensor
    sin_ATD: Tensor
    cache: KVCache
    plans: dict[int | None, AttentionPlan]
    """Attention plans by sliding window; None: full attention."""
