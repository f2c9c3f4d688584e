"""Draft heads: small networks that read hidden states of a target and predict tokens after the next.

A head that goes on from its own results (MTP, EAGLE-3) computes row i from the target's hidden state of
token i and from token i + 1, and predicts token i + 2. Its result stands for the hidden state of token i + 1
where the target has not computed that one. Embeddings, and of MTP the output head too, are the target's.

T rows, R rows whose logits are wanted, E hidden, F numbers of a feature: what the head reads of the target's
hidden states. Operations run one by one, not recorded, so that results are new tensors.
"""

from abc import ABC, abstractmethod
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import silu

from llmbox.kernels.lora import AdaptedRows
from llmbox.kernels.ops import Ops

from ..checkpoint.safetensors import ShardSlice
from ..model_config.config import ModelConfig
from ..model_config.draft_heads import Eagle3Config, MedusaConfig
from ..model_config.mtp import mtp_layer
from ..weights.source import Weights, WeightSource, norm_weight
from .attention import Attention
from .decoder import Decoder
from .forward_context import ForwardContext
from .mlp import GatedMLP
from .registry import build_layer


class DraftHead(ABC):
    """Draft head beside a target, with the attributes of a `Decoder` that runners read."""

    adapters: Final = None

    has_keys = True
    """True for a head with a KV cache."""

    def __init__(self, config: ModelConfig, target: Decoder, ops: Ops) -> None:
        self.config = config
        """Its decoder layer, as a model of one layer."""
        self.features = target.config.hidden_size
        """Numbers that it reads of each row of the target."""
        self.ops, self.dtype, self.rank = ops, target.dtype, target.rank

    def enter(self, features_TF: Tensor) -> Tensor:
        """Map the target's states to hidden states [T, E]. A draft begins with it."""
        return features_TF

    @abstractmethod
    def __call__(self, hidden_TE: Tensor, forward: ForwardContext) -> tuple[Tensor, Tensor]:
        """Compute rows, writing their KV: the hidden states that the next tokens are predicted from, and the
        normed ones for `logits`. `forward` has the next token of each row.
        """

    @abstractmethod
    def logits(self, normed_RE: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Return the logits of rows of the last pass. `adapted`: None, as heads have no adapters."""


class MTPHead(DraftHead):
    """Layer for multi-token prediction of the target's checkpoint."""

    def __init__(self, target: Decoder, source: WeightSource) -> None:
        config, ops = target.config, source.ops
        assert config.mtp is not None
        super().__init__(mtp_layer(config), target, ops)
        self.names, self.target = config.mtp, target
        assert target.embedding is not None
        self.embedding = target.embedding
        width, eps = config.hidden_size, config.rms_norm_eps
        weights = Weights(source, names=config.names)
        own = Weights(source, prefix=self.names.prefix)
        self.eps = eps
        self.hidden_norm_E = norm_weight(config, own, self.names.hidden_norm, width)
        self.embedding_norm_E = norm_weight(config, own, self.names.embedding_norm, width)
        whole = ShardSlice.whole(width)
        self.fc = own.linear({self.names.fc: whole}, ShardSlice.whole(2 * width), bias=False)
        self.block = build_layer(self.config, 0, weights.at(self.names.layer), ops)
        self.norm_E = norm_weight(config, own, self.names.norm, width)

    def __call__(self, hidden_TE: Tensor, forward: ForwardContext) -> tuple[Tensor, Tensor]:
        ops, names = self.ops, self.names
        embedded_TE = self.embedding(forward.ids_T)
        if names.hides_first:
            assert forward.layout is not None
            embedded_TE.masked_fill_((forward.layout.positions_T == 0).unsqueeze(1), 0)
        parts = [
            ops.rms_norm(embedded_TE, self.embedding_norm_E, self.eps),
            ops.rms_norm(hidden_TE, self.hidden_norm_E, self.eps),
        ]
        residual_TE = ops.linear(self.fc, torch.cat(parts, 1))
        x_TE = self.block.first(residual_TE)
        x_TE = self.block.complete(self.block(x_TE, residual_TE, forward))
        normed_TE = ops.add_rms_norm(x_TE, residual_TE, self.norm_E, self.eps)
        return (normed_TE if names.returns_normed else residual_TE), normed_TE

    def logits(self, normed_RE: Tensor, adapted: AdaptedRows | None = None) -> Tensor:  # noqa: ARG002
        return self.target.logits(normed_RE)


class Eagle3Head(DraftHead):
    """EAGLE-3 head: a layer whose attention reads embedding and hidden state side by side."""

    def __init__(
        self, config: Eagle3Config, target: Decoder, source: WeightSource, proposed_V: Tensor | None
    ) -> None:
        """`proposed_V`: target's id of each of its tokens; None: they are the same."""
        super().__init__(layer := config.layer, target, source.ops)
        assert target.embedding is not None
        self.embedding = target.embedding
        self.features *= 3
        self.proposed_V, self.vocab = proposed_V, target.config.vocab_size
        self.norm_before_residual = config.norm_before_residual
        weights, width = Weights(source), layer.hidden_size
        self.eps = layer.rms_norm_eps
        hidden, joined = ShardSlice.whole(width), ShardSlice.whole(3 * config.target_hidden)
        self.fc = weights.linear({"fc": hidden}, joined, bias=False)
        own = weights.at("midlayer")
        self.hidden_norm_E = norm_weight(layer, own, "hidden_norm", width)
        self.embedding_norm_E = norm_weight(layer, own, "input_layernorm", width)
        self.attention = Attention(layer, 0, own.at("self_attn"), self.ops, 2 * width)
        self.post_norm_E = norm_weight(layer, own, "post_attention_layernorm", width)
        self.mlp = GatedMLP(layer, own.at("mlp"), self.ops)
        self.norm_E = norm_weight(layer, weights, "norm", width)
        self.head = weights.head("lm_head", ShardSlice.whole(config.vocab), width)
        for name in ("t2d", "d2t", "embed_tokens.weight"):
            weights.skip(name)
        source.finish()

    def enter(self, features_TF: Tensor) -> Tensor:
        return self.ops.linear(self.fc, features_TF)

    def __call__(self, hidden_TE: Tensor, forward: ForwardContext) -> tuple[Tensor, Tensor]:
        ops = self.ops
        embedded_TE = ops.rms_norm(self.embedding(forward.ids_T), self.embedding_norm_E, self.eps)
        normed_TE = ops.rms_norm(hidden_TE, self.hidden_norm_E, self.eps)
        residual_TE = (normed_TE if self.norm_before_residual else hidden_TE).clone()
        x_TE = self.attention(torch.cat((embedded_TE, normed_TE), 1), forward)
        x_TE = self.mlp(ops.add_rms_norm(x_TE, residual_TE, self.post_norm_E, self.eps))
        normed_TE = ops.add_rms_norm(x_TE, residual_TE, self.norm_E, self.eps)
        return residual_TE, normed_TE

    def logits(self, normed_RE: Tensor, adapted: AdaptedRows | None = None) -> Tensor:  # noqa: ARG002
        logits_RV = self.ops.logits(self.head, normed_RE)
        if self.proposed_V is None:
            return logits_RV
        whole_RV = logits_RV.new_full((len(logits_RV), self.vocab), -torch.inf, dtype=torch.float32)
        return whole_RV.index_copy_(1, self.proposed_V, logits_RV[:, : len(self.proposed_V)].float())


class MedusaHeads(DraftHead):
    """Medusa: head j predicts the token j + 1 after the next, from the same hidden state. `config` is the
    target's.
    """

    has_keys = False

    def __init__(self, config: MedusaConfig, target: Decoder, source: WeightSource) -> None:
        super().__init__(target.config, target, source.ops)
        weights = Weights(source)
        hidden, vocab = ShardSlice.whole(config.hidden), ShardSlice.whole(config.vocab)
        self.blocks = [
            [weights.linear({f"{j}.{i}.linear": hidden}, hidden, bias=True) for i in range(config.blocks)]
            for j in range(config.heads)
        ]
        self.heads = [weights.head(f"{j}.{config.blocks}", vocab, config.hidden) for j in range(config.heads)]
        self._pass = 0
        """Number of the next pass: each has a separate head."""
        source.finish()

    def enter(self, features_TF: Tensor) -> Tensor:
        self._pass = 0
        return features_TF

    def __call__(self, hidden_TE: Tensor, forward: ForwardContext) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return hidden_TE, hidden_TE

    def logits(self, normed_RE: Tensor, adapted: AdaptedRows | None = None) -> Tensor:  # noqa: ARG002
        blocks, head = self.blocks[self._pass], self.heads[self._pass]
        self._pass += 1
        for block in blocks:
            normed_RE = normed_RE + silu(self.ops.linear(block, normed_RE))
        return self.ops.logits(head, normed_RE)
