from dataclasses import replace

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config.config import ModelConfig
from ..weights.source import Weights
from .forward_context import ForwardContext


class TokenEmbedding:
    """Token embedding. With tensor parallelism each rank has a slice of the vocabulary: rows of ids outside
    it are zeros, and an all-reduce adds up the ranks' rows.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.ops = ops
        self.rank = weights.rank
        self._part = self.rank.layout.vocabulary(config.vocab_size)
        self._outside_T1: Tensor | None = None
        self._scale = config.scales.embedding
        if config.scales.rounds_embedding:
            self._scale = float(torch.tensor(self._scale, dtype=weights.dtype))
        self.packed = weights.embedding(
            "model.embed_tokens", self._part, config.hidden_size, tied=config.tie_word_embeddings
        )

    def localize_ids(self, forward: ForwardContext) -> ForwardContext:
        """Map token ids to rows of this rank's slice; ids outside it are clamped and masked later."""
        if self._part.is_whole:
            return forward
        local_T = forward.ids_T - self._part.start
        held = self._part.stop - self._part.start
        self._outside_T1 = ((local_T < 0) | (local_T >= held)).unsqueeze(1)
        return replace(forward, ids_T=local_T.clamp_(0, held - 1))

    def __call__(self, ids_T: Tensor) -> Tensor:
        x_TE = self.ops.embedding(self.packed, ids_T, self._scale)
        if not self._part.is_whole:
            self.ops.host_callback(self._complete, (x_TE,))
        return x_TE

    def _complete(self, x_TE: Tensor) -> None:
        assert self._outside_T1 is not None
        x_TE.masked_fill_(self._outside_T1, 0)
        self.rank.communicator.all_reduce(x_TE)
