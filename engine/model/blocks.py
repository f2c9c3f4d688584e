"""Decoder layers with pre-norm, post-norm and sandwich norm, behind one interface.

Between layers a row has two parts: the residual, which grows in place, and the last layer's output, not added
yet. So the next norm can add and norm in one operation. T rows of the step, E hidden.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear

from ..checkpoint.safetensors import ShardSlice
from ..model_config.config import ModelConfig
from ..weights.source import Weights, norm_bias, norm_weight
from .attention import SharedAttention
from .forward_context import ForwardContext
from .mlp import SharedMLP


class Mixer(Protocol):
    """Attention or a recurrent layer."""

    @property
    def input(self) -> PackedLinear:
        """Linear that reads the rows first."""
        ...

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        """Map rows [T, E] to partial results for `TensorParallel.add_rms_norm`."""
        ...


class MLP(Protocol):
    @property
    def input(self) -> PackedLinear:
        """Linear that reads the rows first."""
        ...

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map rows [T, E] to partial results for `TensorParallel.add_rms_norm`."""
        ...


class DecoderBlock(ABC):
    """One layer. Layers of one model have one class: `added_TE` is the previous layer's output."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, attention: Mixer, mlp: MLP) -> None:
        self.ops = ops
        self.before_attention, self.before_mlp = ops.before(attention.input), ops.before(mlp.input)
        self.rank = weights.rank
        self.eps = config.rms_norm_eps
        self.attention = attention
        self.mlp = mlp

    @abstractmethod
    def first(self, residual_TE: Tensor) -> Tensor:
        """Return the input of `__call__` of the model's first layer: there is no output to add yet."""

    @abstractmethod
    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """Add the previous layer's output to `residual_TE` in place and return the input of `__call__`."""

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """Do as `enter` for a `complete` output: one that came from the previous pipeline stage."""
        return self.enter(added_TE, residual_TE)

    @abstractmethod
    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        """Add the attention's output to `residual_TE` in place; return the MLP's output, not added yet."""

    def complete(self, added_TE: Tensor) -> Tensor:
        """Finish the all-reduce of an output of `__call__`."""
        return self.rank.finish_all_reduce(self.ops, added_TE)


class PreNormBlock(DecoderBlock):
    """Norms before attention and MLP."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, attention: Mixer, mlp: MLP) -> None:
        super().__init__(config, weights, ops, attention, mlp)
        self.input_norm_E = norm_weight(config, weights, "input_layernorm", config.hidden_size)
        self.post_norm_E = norm_weight(config, weights, "post_attention_layernorm", config.hidden_size)

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.before_attention.rms_norm(residual_TE, self.input_norm_E, self.eps)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        ops = self.before_attention
        return self.rank.add_rms_norm(ops, added_TE, residual_TE, self.input_norm_E, self.eps)

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.before_attention.add_rms_norm(added_TE, residual_TE, self.input_norm_E, self.eps)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        x_TE = self.attention(x_TE, forward)
        ops = self.before_mlp
        return self.mlp(self.rank.add_rms_norm(ops, x_TE, residual_TE, self.post_norm_E, self.eps))


class SingleNormBlock(DecoderBlock):
    """One norm, before attention, a recurrent layer or else an MLP (Nemotron-H, some layers of DeciLM)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        mixer: Mixer | None,
        mlp: MLP | None,
        norm: str,
    ) -> None:
        part = mlp if mixer is None else mixer
        assert part is not None
        self.ops, self.before = ops, ops.before(part.input)
        self.rank = weights.rank
        self.eps = config.rms_norm_eps
        self.mixer, self.mlp_alone = mixer, mlp
        self.norm_E = norm_weight(config, weights, norm, config.hidden_size)

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.before.rms_norm(residual_TE, self.norm_E, self.eps)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.rank.add_rms_norm(self.before, added_TE, residual_TE, self.norm_E, self.eps)

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.before.add_rms_norm(added_TE, residual_TE, self.norm_E, self.eps)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:  # noqa: ARG002
        if self.mixer is not None:
            return self.mixer(x_TE, forward)
        assert self.mlp_alone is not None
        return self.mlp_alone(x_TE)


class EmptyBlock(DecoderBlock):
    """Layer without attention and MLP (DeciLM), which hands the output of the one before on."""

    def __init__(self, weights: Weights, ops: Ops) -> None:
        self.ops, self.rank = ops, weights.rank

    def first(self, residual_TE: Tensor) -> Tensor:
        return torch.zeros_like(residual_TE)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:  # noqa: ARG002
        return added_TE

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:  # noqa: ARG002
        return self.rank.as_partial(added_TE)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:  # noqa: ARG002
        return x_TE


class LayerNormBlock(PreNormBlock):
    """`PreNormBlock` with LayerNorms that have biases (Phi-MoE, Nemotron), or no weights either (OLMo)."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, attention: Mixer, mlp: MLP) -> None:
        super().__init__(config, weights, ops, attention, mlp)
        self.input_bias_E = norm_bias(config, weights, "input_layernorm", self.input_norm_E)
        self.post_bias_E = norm_bias(config, weights, "post_attention_layernorm", self.post_norm_E)

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.ops.layer_norm(residual_TE, None, self.input_norm_E, self.eps, self.input_bias_E)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.resume(self.complete(added_TE), residual_TE)

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.ops.layer_norm(added_TE, residual_TE, self.input_norm_E, self.eps, self.input_bias_E)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        x_TE = self.complete(self.attention(x_TE, forward))
        x_TE = self.ops.layer_norm(x_TE, residual_TE, self.post_norm_E, self.eps, self.post_bias_E)
        return self.mlp(x_TE)


class PostNormBlock(DecoderBlock):
    """Norms after attention and MLP, which read the residual as it is.

    Its output is `complete`: the norm needs the all-reduced sum.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, attention: Mixer, mlp: MLP) -> None:
        super().__init__(config, weights, ops, attention, mlp)
        self.after_attention_E = norm_weight(config, weights, "post_attention_layernorm", config.hidden_size)
        self.after_mlp_E = norm_weight(config, weights, "post_feedforward_layernorm", config.hidden_size)
        self.after_eps = config.post_norm_eps or config.rms_norm_eps * config.scales.residual**2
        """Epsilon of norms after attention and MLP, whose rows are not divided as the residual is."""

    def first(self, residual_TE: Tensor) -> Tensor:
        return residual_TE

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        # Only the addition is needed: the norm comes with it and reads no more memory.
        self.ops.add_rms_norm(added_TE, residual_TE, self.after_attention_E, self.eps)
        return residual_TE

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        added_TE = self._norm(self.attention(x_TE, forward), self.after_attention_E)
        return self._norm(self.mlp(self.enter(added_TE, residual_TE)), self.after_mlp_E)

    def complete(self, added_TE: Tensor) -> Tensor:
        return added_TE

    def _norm(self, partial_TE: Tensor, norm_E: Tensor) -> Tensor:
        return self.ops.rms_norm(self.rank.finish_all_reduce(self.ops, partial_TE), norm_E, self.after_eps)


class SandwichNormBlock(PostNormBlock):
    """Norms before and after attention and MLP."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, attention: Mixer, mlp: MLP) -> None:
        super().__init__(config, weights, ops, attention, mlp)
        self.input_norm_E = norm_weight(config, weights, "input_layernorm", config.hidden_size)
        self.before_mlp_E = norm_weight(config, weights, "pre_feedforward_layernorm", config.hidden_size)

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.before_attention.rms_norm(residual_TE, self.input_norm_E, self.eps)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.before_attention.add_rms_norm(added_TE, residual_TE, self.input_norm_E, self.eps)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        x_TE = self._norm(self.attention(x_TE, forward), self.after_attention_E)
        x_TE = self.before_mlp.add_rms_norm(x_TE, residual_TE, self.before_mlp_E, self.eps)
        return self._norm(self.mlp(x_TE), self.after_mlp_E)


class ParallelBlock(DecoderBlock):
    """One LayerNorm, whose result attention and MLP both read (Cohere, Phi)."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, attention: Mixer, mlp: MLP) -> None:
        super().__init__(config, weights, ops, attention, mlp)
        self.input_norm_E = weights.vector("input_layernorm.weight", config.hidden_size)
        self.input_bias_E = norm_bias(config, weights, "input_layernorm", self.input_norm_E)

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.ops.layer_norm(residual_TE, None, self.input_norm_E, self.eps, self.input_bias_E)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.resume(self.complete(added_TE), residual_TE)

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.ops.layer_norm(added_TE, residual_TE, self.input_norm_E, self.eps, self.input_bias_E)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        self._add(self.complete(self.attention(x_TE, forward)), residual_TE)
        return self.mlp(x_TE)

    def _add(self, added_TE: Tensor, residual_TE: Tensor) -> None:
        # A norm comes with the addition: another than that of `x_TE`, whose place its result would take.
        self.ops.add_rms_norm(added_TE, residual_TE, self.input_norm_E, self.eps)


class ParallelRMSNormBlock(ParallelBlock):
    """`ParallelBlock` with an RMS norm."""

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.ops.rms_norm(residual_TE, self.input_norm_E, self.eps)

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.ops.add_rms_norm(added_TE, residual_TE, self.input_norm_E, self.eps)

    def _add(self, added_TE: Tensor, residual_TE: Tensor) -> None:
        self.ops.layer_norm(added_TE, residual_TE, self.input_norm_E, self.eps)


class ParallelNormsBlock(ParallelBlock):
    """A LayerNorm for attention and one for the MLP, both of the layer's input (GPT-NeoX, Falcon)."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, attention: Mixer, mlp: MLP) -> None:
        super().__init__(config, weights, ops, attention, mlp)
        self.mlp_norm_E = weights.vector("post_attention_layernorm.weight", config.hidden_size)
        self.mlp_bias_E = norm_bias(config, weights, "post_attention_layernorm", self.mlp_norm_E)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        added_TE = self.complete(self.attention(x_TE, forward))
        x_TE = self.ops.layer_norm(residual_TE, None, self.mlp_norm_E, self.eps, self.mlp_bias_E)
        # Only the addition is needed: the norm comes with it. Before the MLP, whose result takes the place of
        # `added_TE`.
        self.ops.add_rms_norm(added_TE, residual_TE, self.mlp_norm_E, self.eps)
        return self.mlp(x_TE)


class SharedParts(NamedTuple):
    """Weights of a block that several layers share, and where they are."""

    weights: Weights
    norm_2E: Tensor
    attention: SharedAttention
    mlp_norm_E: Tensor
    mlp: SharedMLP

    @classmethod
    def read(cls, config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> "SharedParts":
        wide = 2 * config.hidden_size
        return cls(
            weights,
            weights.vector("input_layernorm.weight", wide),
            SharedAttention(config, layer, weights.at("self_attn"), ops, inputs=wide),
            weights.vector("pre_ff_layernorm.weight", config.hidden_size),
            SharedMLP(config, weights.at("feed_forward"), ops),
        )


class SharedBlock(DecoderBlock):
    """Attention and MLP of a shared block, whose result is added to the input of a recurrent layer alone
    (Zamba2). They read the model's embedding beside the residual.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, mixer: Mixer, parts: SharedParts, layer: int
    ) -> None:
        self.ops, self.rank, self.eps = ops, weights.rank, config.rms_norm_eps
        self.mixer, self.parts = mixer, parts
        self.attention = parts.attention.for_use(config, parts.weights.at("self_attn"), layer)
        self.shared_mlp = parts.mlp.for_use(config, parts.weights.at("feed_forward"), layer)
        whole = ShardSlice.whole(config.hidden_size)
        self.linear = weights.linear({"linear": whole}, whole, bias=False)
        self.norm_E = norm_weight(config, weights, "input_layernorm", config.hidden_size)
        self.ones_E = torch.ones(config.hidden_size, device=weights.device)

    def first(self, residual_TE: Tensor) -> Tensor:
        return residual_TE

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        # Only the addition is needed: the norm comes with it and reads no more memory.
        self.rank.add_rms_norm(self.ops, added_TE, residual_TE, self.norm_E, self.eps)
        return residual_TE

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        self.ops.add_rms_norm(added_TE, residual_TE, self.norm_E, self.eps)
        return residual_TE

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        assert forward.embedding_TE is not None
        ops, rank, parts = self.ops, self.rank, self.parts
        assert ops.recurrent is not None
        both_T2E = ops.concat((x_TE.unsqueeze(1), forward.embedding_TE.unsqueeze(1))).flatten(1)
        x_TE = self.attention(ops.rms_norm(both_T2E, parts.norm_2E, self.eps), forward)
        x_TE = ops.rms_norm(rank.finish_all_reduce(ops, x_TE), parts.mlp_norm_E, self.eps)
        x_TE = ops.linear(self.linear, rank.finish_all_reduce(ops, self.shared_mlp(x_TE)))
        x_TE = ops.recurrent.mul_add(x_TE, self.ones_E, residual_TE)
        return self.mixer(ops.rms_norm(x_TE, self.norm_E, self.eps), forward)
