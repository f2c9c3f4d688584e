"""Inputs that every layer of one forward pass shares."""

from dataclasses import dataclass

from torch import Tensor

from llmbox.kernels.op_types import BatchLayout
from llmbox.kernels.ops import AttentionPlan, KVCache
from llmbox.kernels.recurrent import RecurrentState


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Embeddings of images, which replace those of tokens. R of the step's rows, L = 1 + deepstack levels."""

    rows_R: Tensor
    levels_LRE: Tensor
    """Embeddings of the rows, then what is added to them after each of the first layers."""

    def add_level(self, level: int, residual_TE: Tensor) -> None:
        """Add what belongs to the rows after the first `level` layers of the model, if anything does."""
        if level < len(self.levels_LRE):
            residual_TE[self.rows_R] += self.levels_LRE[level]


TaskRows = tuple[slice, int]
"""Rows of a text that names a task, and the task's index."""


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
    window_cache: KVCache | None = None
    """KV cache of sliding-window layers, where it is separate."""
    layout: BatchLayout | None = None
    states: RecurrentState | None = None
    """These two for models with recurrent layers; the layout for encoders too."""
    types_T: Tensor | None = None
    """Token types of an encoder's rows; None: all 0."""
    task_rows: tuple[TaskRows, ...] = ()
    """Texts of an encoder that name a task with an adapter."""
    own_TLP: Tensor | None = None
    """Embeddings of each layer, for models that have some."""
    embedding_TE: Tensor | None = None
    """Input of the first layer, for models whose later layers read it too."""
    images: ImageRows | None = None
    """For steps with rows of images."""
