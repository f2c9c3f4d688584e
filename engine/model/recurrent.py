"""Recurrent layers: short convolutions with gates (LFM2).

T rows of the step, E hidden, C channels of the convolution on this rank, K inputs that it spans.
"""

from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config.config import ModelConfig
from ..model_config.recurrent import RecurrentConfig
from ..partition import ShardSlice
from ..weights.source import Weights
from .forward_context import ForwardContext


class RecurrentLayer:
    """What recurrent layers have in common: the operations, and the layer's place in the state."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        assert config.recurrent is not None
        assert ops.recurrent is not None
        self.config: RecurrentConfig = config.recurrent
        self.ops, self.recurrent = ops, ops.recurrent
        self.rank = weights.rank
        stage = self.rank.layout.layers(config.num_layers)
        self.layer = config.layers_with(range(stage.start, layer), state=True)
        """Index in the recurrent state, which holds the layers of this stage."""


class ShortConv(RecurrentLayer):
    """Gated short convolution: output(c conv(b x)), with b, c and x of one linear."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        channels = self.rank.part(recurrent.channels)
        mine = slice(channels.start, channels.stop)
        names = ("in_proj_b", "in_proj_c", "in_proj_x")
        weights.split("in_proj", dict.fromkeys(names, recurrent.channels))
        self.input = weights.linear(dict.fromkeys(names, channels), hidden, bias=recurrent.bias)
        weight_C1K = weights.floats("conv.weight", recurrent.channels, 1, recurrent.conv_width)
        self.weight_KC = weight_C1K[mine, 0].t().contiguous()
        self.bias_C = weights.floats("conv.bias", recurrent.channels)[mine] if recurrent.bias else None
        self.output = weights.linear({"out_proj": hidden}, channels, bias=recurrent.bias)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        assert forward.states is not None
        assert forward.layout is not None
        bcx = self.ops.linear(self.input, x_TE)
        out_TC = self.recurrent.short_conv(
            bcx, self.weight_KC, self.bias_C, True, forward.states, self.layer, forward.layout
        )
        return self.rank.partial(self.ops, self.output, out_TC, x_TE.shape[1])
