"""Layers of Gemma 3n: rows of several streams (AltUp), an augmented residual (LAuReL), and gates of which few
stay.

T rows, E hidden, N streams of a row, F rows of the MLP on this rank.
"""

from statistics import NormalDist

import torch
from torch import Tensor

from llmbox.kernels.altup import AltUpOps
from llmbox.kernels.ops import Ops

from ..model_config.config import ModelConfig
from ..partition import ShardSlice
from ..weights.source import Weights, norm_weight
from .attention import Attention
from .blocks import DecoderBlock
from .forward_context import ForwardContext
from .gemma4 import OwnEmbedding
from .mlp import GatedMLP

HALF = 0.5**0.5
LEAST_SQUARE = 1e-5
"""Least mean square of a projection, as in transformers."""


class FewGatesMLP(GatedMLP):
    """MLP of which only gates above mean + factor deviation stay, less that."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        sizes = config.sizes_of(layer)
        super().__init__(config, weights, ops, sizes.inner)
        self.width = sizes.inner
        self.factor = 0.0
        if sizes.sparsity:
            self.factor = NormalDist().inv_cdf(sizes.sparsity)
        self.is_sparse = sizes.sparsity > 0

    def inner(self, x_TE: Tensor) -> Tensor:
        if not self.is_sparse:
            return super().inner(x_TE)
        ops, altup = self.ops, operations(self.ops)
        gate_up = ops.linear(self.gate_up, x_TE)
        gate_TF = gate_up[:, : gate_up.shape[1] // 2]
        sums_T2 = altup.gate_sums(gate_TF)
        if self.rank.layout.tp > 1:
            ops.host_callback(self.rank.communicator.all_reduce, (sums_T2,))
        altup.cut_gates(gate_TF, sums_T2, self.width, self.factor)
        return ops.gate_mul(gate_up, self.activation)


class Router:
    """Coefficients of streams: linear(norm(x) / E), and a small matrix by which the tanh of that counts."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        assert config.altup is not None
        self.ops, self.eps = ops, config.rms_norm_eps
        streams, hidden = config.altup.streams, config.hidden_size
        self.norm_E = norm_weight(config, weights, "router_norm", hidden).float() / hidden
        self.linear = weights.router("modality_router", ShardSlice.whole(streams), ShardSlice.whole(hidden))
        self.prediction = weights.floats("prediction_coefs.weight", streams**2, streams)
        self.correction = weights.floats("correction_coefs.weight", streams, streams)


class AltUpBlock(DecoderBlock):
    """Layer of which one stream passes through attention and MLP, and all are predicted and corrected.

    Input and output of `__call__` are all streams [T, N E]; there is no residual beside them.
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, ops: Ops, attention: Attention
    ) -> None:
        assert config.altup is not None
        super().__init__(config, weights, ops, attention, FewGatesMLP(config, layer, weights.at("mlp"), ops))
        assert ops.recurrent is not None
        self.altup, self.mul_add = operations(ops), ops.recurrent.mul_add
        self.active = config.altup.active
        hidden, rank = config.hidden_size, ShardSlice.whole(config.altup.laurel_rank)
        self.hidden = hidden
        self.router = Router(config, weights.at("altup"), ops)
        self.input_norm_E = norm_weight(config, weights, "input_layernorm", hidden)
        self.before_mlp_E = norm_weight(config, weights, "pre_feedforward_layernorm", hidden)
        self.after_mlp_E = norm_weight(config, weights, "post_feedforward_layernorm", hidden)
        # The sum of these two and of the stream before them is divided by the square root of 2.
        self.after_attention_E = (
            HALF * norm_weight(config, weights, "post_attention_layernorm", hidden).float()
        )
        laurel, whole = weights.at("laurel"), ShardSlice.whole(hidden)
        self.left = laurel.linear({"linear_left": rank}, whole, bias=False)
        self.right = laurel.linear({"linear_right": whole}, rank, bias=False)
        self.after_laurel_E = HALF * norm_weight(config, laurel, "post_laurel_norm", hidden).float()
        self.half_E = torch.full((hidden,), HALF)
        scale_E = weights.floats("altup.correct_output_scale", hidden)
        self.output_scale_E = scale_E if config.altup.scales_output else None
        self.own = OwnEmbedding(config, layer, weights, ops)

    def first(self, residual_TE: Tensor) -> Tensor:
        return residual_TE

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:  # noqa: ARG002
        return added_TE

    def complete(self, added_TE: Tensor) -> Tensor:
        return added_TE

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:  # noqa: ARG002
        ops, router, eps = self.ops, self.router, self.eps
        routed_TN = ops.logits(router.linear, ops.rms_norm(self._active(x_TE), router.norm_E, eps))
        predicted = self.altup.predict(x_TE, routed_TN, router.prediction)
        normed_TE = ops.rms_norm(self._active(predicted), self.input_norm_E, eps)
        # A copy: norms inside attention may take its place.
        normed_TE = ops.concat([normed_TE.unsqueeze(1)]).flatten(1)
        row_TE = self._add_laurel(self._active(predicted), normed_TE)
        added_TE = self._norm(self.attention(normed_TE, forward), self.after_attention_E)
        added_TE = self.mlp(ops.add_rms_norm(added_TE, row_TE, self.before_mlp_E, eps))
        added_TE = self._norm(added_TE, self.after_mlp_E)
        routed_TN = ops.logits(router.linear, ops.add_rms_norm(added_TE, row_TE, router.norm_E, eps))
        streams = self.altup.correct(predicted, row_TE, self.active, routed_TN, router.correction)
        own_TE = self._active(streams)
        if self.output_scale_E is not None:
            own_TE = self.mul_add(own_TE, self.output_scale_E, None)
        own_TE = ops.rms_norm(self.own(own_TE, forward), self.own.norm_E, eps)
        self.altup.add_to_others(streams, own_TE)
        return streams

    def _add_laurel(self, active_TE: Tensor, normed_TE: Tensor) -> Tensor:
        """Return (active + normed + laurel(normed)) / sqrt(2)."""
        ops, by_E = self.ops, self.half_E
        row_TE = self.mul_add(normed_TE, by_E, self.mul_add(active_TE, by_E, None))
        laurel_TE = ops.linear(self.right, ops.linear(self.left, normed_TE))
        laurel_TE = ops.rms_norm(laurel_TE, self.after_laurel_E, self.eps)
        # Only the addition is needed: the norm comes with it.
        ops.add_rms_norm(laurel_TE, row_TE, self.before_mlp_E, self.eps)
        return row_TE

    def _active(self, streams: Tensor) -> Tensor:
        start = self.active * self.hidden
        return streams[:, start : start + self.hidden]

    def _norm(self, partial_TE: Tensor, norm_E: Tensor) -> Tensor:
        return self.ops.rms_norm(self.rank.finish_all_reduce(self.ops, partial_TE), norm_E, self.eps)


class AltUpStreams:
    """Streams before the first layer, and the row that they make after the last."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        assert config.altup is not None
        assert ops.recurrent is not None
        self.ops, self.altup, self.mul_add = ops, operations(ops), ops.recurrent.mul_add
        self.hidden, self.streams = config.hidden_size, config.altup.streams
        whole, others = ShardSlice.whole(self.hidden), range(self.streams - 1)
        self.expansion = weights.linear(
            {f"model.altup_projections.{stream}": whole for stream in others}, whole, bias=False
        )
        self.contractions = [
            weights.linear({f"model.altup_unembed_projections.{stream}": whole}, whole, bias=False)
            for stream in others
        ]
        self.share_E = torch.full((self.hidden,), 1 / self.streams)

    def expand(self, x_TE: Tensor) -> Tensor:
        """Return streams of an embedding: the row, and its projections in its size."""
        others = self.ops.linear(self.expansion, x_TE)
        self.altup.match_size(others, x_TE, LEAST_SQUARE)
        return self.ops.concat([x_TE.unsqueeze(1), others.unsqueeze(1)]).flatten(1)

    def contract(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return two parts of the mean of the first stream and the projections of others in its size."""
        ops, width = self.ops, self.hidden
        first_TE = streams[:, :width]
        sum_TE = self.mul_add(first_TE, self.share_E, None)
        for number, linear in enumerate(self.contractions, 1):
            x_TE = ops.linear(linear, streams[:, number * width : (number + 1) * width])
            self.altup.match_size(x_TE, first_TE, LEAST_SQUARE)
            if number < self.streams - 1:
                sum_TE = self.mul_add(x_TE, self.share_E, sum_TE)
        return ops.scale(x_TE, 1 / self.streams), sum_TE


def operations(ops: Ops) -> AltUpOps:
    assert ops.altup is not None
    return ops.altup
