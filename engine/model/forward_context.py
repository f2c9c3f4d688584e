"""What every layer of one forward pass is given."""

from dataclasses import dataclass

from torch import Tensor

from llmbox.kernels.ops import AttentionPlan, KVCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """T rows of the step; see `kernels/ops.py` for the forms of cos and sin."""

    ids_T: Tensor
    cos_ATD: Tensor
    sin_ATD: Tensor
    cache: KVCache
    plans: dict[int | None, AttentionPlan]
    """By sliding window."""
