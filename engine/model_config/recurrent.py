"""Recurrent layers of hybrid models: short convolutions in place of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llmbox.kernels.support import MAX_CONV_WIDTH

from .fields import Fields
from .shape import RecurrentShape

FULL = "full_attention"
RecurrentKind = Literal["short_conv"]
STATE_BYTES = 4
"""Bytes of a number of recurrent state, which is float32 whatever the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """Recurrent layers of a model, all of one kind and size."""

    kind: RecurrentKind
    layers: tuple[bool, ...]
    """True for each recurrent layer; the others have attention."""
    channels: int
    """Channels of the convolution."""
    conv_width: int
    """Inputs that it spans."""
    bias: bool = False
    """True if the convolution and the linears around it have biases."""

    def parameters(self, hidden: int) -> int:
        """Return the parameters of a layer, which has them in place of those of attention."""
        biases = (3 * self.channels + self.channels + hidden) * self.bias
        return 4 * hidden * self.channels + self.channels * self.conv_width + biases

    def shape(self) -> RecurrentShape:
        return RecurrentShape(
            is_recurrent=self.layers,
            layers=sum(self.layers),
            attention_layers=len(self.layers) - sum(self.layers),
            layer_bytes=STATE_BYTES * self.channels * (self.conv_width - 1),
            divisible=(("channels of its convolutions", self.channels),),
        )


RecurrentRule = Callable[[Fields, int], RecurrentConfig | None]
"""Rule (config.json, number of layers) -> recurrent layers; None for a model without. Raises ModelError."""


def no_recurrence(_fields: Fields, _layers: int) -> None:
    return None


def lfm2_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the short convolutions of `layer_types`, or of all layers but `full_attn_idxs`."""
    types = fields.raw.get("layer_types")
    if types is None:
        full = fields.raw.get("full_attn_idxs")
        full = list(range(layers)) if full is None else full
        if not isinstance(full, list) or not all(type(i) is int and 0 <= i < layers for i in full):
            raise fields.error(f"full_attn_idxs must be a list of layers below {layers}")
        types = [FULL if layer in full else "conv" for layer in range(layers)]
    found = RecurrentConfig(
        kind="short_conv",
        layers=recurrent_layers(fields, types, layers, "conv"),
        channels=fields.integer("hidden_size"),
        conv_width=conv_width(fields, "conv_L_cache", 3),
        bias=fields.flag("conv_bias", default=False),
    )
    return found if any(found.layers) else None


def recurrent_layers(fields: Fields, types: Any, layers: int, name: str) -> tuple[bool, ...]:
    """Return True for each layer called `name` in `types`. Raises ModelError, also for a model without
    attention.
    """
    if not isinstance(types, list) or len(types) != layers or not all(t in (FULL, name) for t in types):
        raise fields.error(f"layer_types must name {FULL} or {name} for each of {layers} layers")
    if FULL not in types:
        raise fields.error("no layer has attention: models that are recurrent throughout are not supported")
    return tuple(kind == name for kind in types)


def conv_width(fields: Fields, key: str, default: int) -> int:
    width = fields.integer(key, default)
    if not 2 <= width <= MAX_CONV_WIDTH:
        raise fields.error(f"{key} {width} is not supported, only 2 to {MAX_CONV_WIDTH}")
    return width


def lfm2_sizes(fields: Fields) -> dict[str, Any]:
    """Return the intermediate size that LFM2's files mean: two thirds of theirs, rounded up, unless they say
    otherwise.
    """
    inner = fields.integer("block_ff_dim" if fields.raw.get("block_ff_dim") else "intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        multiple = fields.integer("block_multiple_of", 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return {"intermediate_size": inner}
