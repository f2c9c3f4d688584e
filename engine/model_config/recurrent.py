"""Recurrent layers of hybrid models, in place of attention: short convolutions, gated delta nets, Mamba-2."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llmbox.kernels.support import MAX_CONV_WIDTH

from .fields import Fields, show
from .shape import RecurrentShape

FULL = "full_attention"
RecurrentKind = Literal["short_conv", "gated_delta", "mamba2"]
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
    """True if the linears around the convolution have biases."""
    conv_bias: bool = False
    heads: int = 0
    """Value heads of the memory; 0: there is the convolution alone."""
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    is_interleaved: bool = False
    """True if checkpoints hold the input linears as two tensors, key head by key head."""
    limits: tuple[float, float] = (0.0, math.inf)
    """Limits of a time step of Mamba-2."""

    @property
    def values(self) -> int:
        """Numbers of the values of a row."""
        return self.heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Return the parameters of a layer, which has them in place of those of attention."""
        conv = self.channels * (self.conv_width + self.conv_bias)
        if self.kind == "mamba2":
            rows = self.values + self.channels + self.heads
            biases = (rows + hidden) * self.bias
            return hidden * (rows + self.values) + biases + conv + 3 * self.heads + self.values
        if self.kind == "gated_delta":
            linears = hidden * (self.channels + 2 * self.values + 2 * self.heads)
            return linears + conv + 2 * self.heads + self.value_dim
        biases = (3 * self.channels + hidden) * self.bias
        return 4 * hidden * self.channels + conv + biases

    def shape(self) -> RecurrentShape:
        conv = self.channels * (self.conv_width - 1)
        shared = (("key heads of its recurrent layers", self.key_heads),)
        if self.kind == "short_conv":
            shared = (("channels of its convolutions", self.channels),)
        if self.kind == "mamba2":
            shared = (("groups of heads of its Mamba layers", self.key_heads),)
        return RecurrentShape(
            is_recurrent=self.layers,
            layers=sum(self.layers),
            attention_layers=len(self.layers) - sum(self.layers),
            layer_bytes=STATE_BYTES * (conv + self.values * self.key_dim),
            divisible=shared,
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
        bias=(bias := fields.flag("conv_bias", default=False)),
        conv_bias=bias,
    )
    return found if any(found.layers) else None


def qwen3_next_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    return gated_delta_nets(fields, layers, is_interleaved=True)


def qwen3_5_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    return gated_delta_nets(fields, layers, is_interleaved=False)


def gated_delta_nets(fields: Fields, layers: int, *, is_interleaved: bool) -> RecurrentConfig | None:
    """Return the gated delta nets of `layer_types`, or of all layers but every fourth."""
    types = fields.raw.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", 4)
        types = ["linear_attention" if (layer + 1) % interval else FULL for layer in range(layers)]
    heads, key_heads = (fields.integer(f"linear_num_{what}_heads") for what in ("value", "key"))
    key_dim, value_dim = (fields.integer(f"linear_{what}_head_dim") for what in ("key", "value"))
    if heads % key_heads:
        raise fields.error(
            f"linear_num_value_heads {heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    found = RecurrentConfig(
        kind="gated_delta",
        layers=recurrent_layers(fields, types, layers, "linear_attention"),
        channels=2 * key_heads * key_dim + heads * value_dim,
        conv_width=conv_width(fields, "linear_conv_kernel_dim", 4),
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        is_interleaved=is_interleaved,
    )
    return found if any(found.layers) else None


def granite_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the Mamba-2 layers of `layer_types`, which older files call otherwise."""
    types = fields.raw.get("layer_types") or fields.raw.get("layers_block_type") or ["mamba"] * layers
    known = {"linear_attention": "mamba", "attention": FULL}
    if isinstance(types, list):
        types = [known.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    key_dim, values = fields.integer("mamba_d_state", 256), fields.integer("mamba_expand", 2)
    values *= fields.integer("hidden_size")
    if values % heads or heads % groups:
        raise fields.error(
            f"mamba_n_heads {heads} must divide mamba_expand * hidden_size {values} and be a multiple of "
            f"mamba_n_groups {groups}"
        )
    if fields.raw.get("mamba_d_head") not in (None, "auto", values // heads):
        raise fields.error(f"mamba_d_head {fields.raw['mamba_d_head']!r} is not {values // heads}")
    found = RecurrentConfig(
        kind="mamba2",
        layers=recurrent_layers(fields, types, layers, "mamba"),
        channels=values + 2 * groups * key_dim,
        conv_width=conv_width(fields, "mamba_d_conv", 4),
        bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        heads=heads,
        key_heads=groups,
        key_dim=key_dim,
        value_dim=values // heads,
        limits=time_step_limits(fields),
    )
    return found if any(found.layers) else None


def granite_sizes(fields: Fields) -> dict[str, Any]:
    """Return the MLP's intermediate size, which Granite's files call that of the shared expert."""
    shared = fields.integer("shared_intermediate_size", 1024)
    return {"intermediate_size": shared, "expert_intermediate_size": fields.raw.get("intermediate_size")}


def time_step_limits(fields: Fields) -> tuple[float, float]:
    limits = fields.raw.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    found = [_number_or_infinity(limit) for limit in limits] if isinstance(limits, list) else []
    if len(found) != 2 or not 0.0 <= found[0] <= found[1]:
        raise fields.error(f"time_step_limit {show(limits)} must be two ascending numbers from 0 on")
    return found[0], found[1]


def _number_or_infinity(value: Any) -> float:
    """Return a number, which transformers writes as an object where it is infinite; NaN for anything else."""
    if isinstance(value, dict):
        value = {"Infinity": math.inf}.get(str(value.get("__float__")))
    return float(value) if type(value) in (int, float) else math.nan


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
