"""Recurrent layers of hybrid models, in place of attention: short convolutions, gated delta nets, Mamba."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from llmbox.kernels.support import MAX_CONV_WIDTH

from ...checkpoint.index import CountedTensors, ExpectedTensors
from ..fields import Fields, show
from ..shape import RecurrentShape

FULL = "full_attention"
RecurrentKind = Literal["short_conv", "gated_delta", "kimi_delta", "mamba1", "mamba2"]
GatedNorm = Literal["gate_first", "norm_first"]
StepNorm = Literal["weights", "no_weights"]
STATE_BYTES = 4
"""Bytes of a number of recurrent state, which is float32 whatever the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """Recurrent layers of a model, all of one kind and size."""

    kind: RecurrentKind
    layers: tuple[bool, ...]
    """True for each recurrent layer."""
    attention: tuple[bool, ...]
    """True for each layer with attention: a layer may have both (Falcon-H1), or neither (Nemotron-H)."""
    channels: int
    """Channels of the convolution."""
    conv_width: int
    """Inputs that it spans."""
    bias: bool = False
    """True if the linear before the convolution has a bias."""
    out_bias: bool = False
    """True if the linear at the end has one."""
    conv_bias: bool = False
    heads: int = 0
    """Value heads of the memory; 0: there is the convolution alone."""
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    is_interleaved: bool = False
    """True if checkpoints hold the input linears as two tensors, key head by key head."""
    limits: tuple[float, float] = (0.0, math.inf)
    """Limits of a time step of Mamba-2. Of Kimi delta attention a first one below 0 is the least logarithm of
    a decay."""
    has_full_gates: bool = False
    """True if decays and gates of Kimi delta attention are one linear each, and not one behind another."""
    norm: GatedNorm | None = "gate_first"
    """Norm of a Mamba-2 layer's result, after it was multiplied by its gate or before; None: no norm."""
    beta: float = 1.0
    """Multiplier of the gated delta rule's beta."""
    has_tiled_outputs: bool = False
    """True if the last linear of a gated delta net reads the first value heads of all key heads first."""
    norm_eps: float | None = None
    """Epsilon of the norms inside a layer; None: that of other norms."""
    step_rank: int = 0
    """Width of the rows between the two linears that make the time steps of Mamba 1."""
    step_norm: StepNorm | None = None
    """Norms of these rows, keys and queries, with weights or without; None: there are none."""

    @property
    def values(self) -> int:
        """Numbers of the values of a row."""
        return self.heads * self.value_dim

    @property
    def has_step_weights(self) -> bool:
        return self.step_norm == "weights"

    def shape(self, hidden: int) -> RecurrentShape:
        params = CountedTensors()
        take_recurrent(params, "", hidden, self)
        conv = self.channels * (self.conv_width - 1)
        shared = (("key heads of its recurrent layers", self.key_heads),)
        if self.kind == "short_conv":
            shared = (("channels of its convolutions", self.channels),)
        if self.kind == "mamba2":
            shared = (("groups of heads of its Mamba layers", self.key_heads),)
        if self.kind == "mamba1":
            shared = (("groups of channels of its Mamba layers", self.heads),)
        if self.has_tiled_outputs:
            shared = (("value heads in the order of its GGUF file", 1),)
        return RecurrentShape(
            is_recurrent=self.layers,
            has_kv=self.attention,
            layers=sum(self.layers),
            attention_layers=sum(self.attention),
            layer_params=params.numbers,
            layer_bytes=STATE_BYTES * (conv + self.values * self.key_dim),
            divisible=shared,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlocksConfig:
    """Blocks of attention and MLP that several layers share (Zamba2), before the recurrent layer of each.
    They read the embedding beside the residual.
    """

    layers: tuple[int, ...]
    """Layers with such a block, which is that of `layers[n % blocks]` in the n-th of them."""
    blocks: int
    rank: int
    """Width of the adapters that each of these layers has of its own."""
    adapts_attention: bool
    """True if queries, keys and values have adapters, as MLPs have."""

    def uses(self, layer: int) -> tuple[int, ...]:
        """Return which of the layers share the block whose weights are in `layer`; empty: none are."""
        first = self.layers.index(layer)
        return tuple(range(first, len(self.layers), self.blocks)) if first < self.blocks else ()


_MODULES: Final = {
    "gated_delta": "linear_attn",
    "kimi_delta": "self_attn",
    "mamba1": "mamba",
    "mamba2": "mamba",
    "short_conv": "conv",
}
"""Name of the module, in the checkpoints that most models of a kind have."""


def take_recurrent(found: ExpectedTensors, prefix: str, hidden: int, recurrent: RecurrentConfig) -> None:
    """Take the tensors of a layer, whose names begin with `prefix`, without those of attention beside it."""
    module = found.at(prefix, f"{_MODULES[recurrent.kind]}.")
    _take_inputs(found, module, hidden, recurrent)
    _take_convolution(found, module, recurrent)
    if recurrent.heads and recurrent.kind != "mamba1":
        _take_decays(found, module, recurrent)
    outputs = "o_proj" if recurrent.kind == "kimi_delta" else "out_proj"
    values = recurrent.channels if recurrent.kind == "short_conv" else recurrent.values
    found.linears(module, {outputs: hidden}, values, bias=recurrent.out_bias)


def _take_inputs(found: ExpectedTensors, module: str, hidden: int, recurrent: RecurrentConfig) -> None:
    heads, values, keys = recurrent.heads, recurrent.values, recurrent.key_heads * recurrent.key_dim
    stacks: tuple[str, ...] = ()
    match recurrent.kind:
        case "short_conv":
            stacks = ("in_proj",)
            parts = dict.fromkeys(("in_proj_b", "in_proj_c", "in_proj_x"), recurrent.channels)
        case "mamba2":
            stacks = ("in_proj",)
            parts = {"in_proj_z": values, "in_proj_x": values, "in_proj_B": keys, "in_proj_C": keys}
            parts["in_proj_dt"] = heads
        case "mamba1":
            stacks = ("in_proj",)
            parts = dict.fromkeys(("in_proj_x", "in_proj_z"), values)
            _take_time_steps(found, module, recurrent)
        case "kimi_delta":
            parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), values)
            _take_kimi_gates(found, module, hidden, recurrent)
        case _ if recurrent.is_interleaved:
            parts = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
        case _:
            parts = {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
            qkv = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
            found.linears(module, qkv, hidden, stacks=("in_proj_qkv",))
    found.linears(module, parts, hidden, bias=recurrent.bias, stacks=stacks)


def _take_kimi_gates(found: ExpectedTensors, module: str, hidden: int, recurrent: RecurrentConfig) -> None:
    inner, values = recurrent.key_dim, recurrent.values
    found.linears(module, {"b_proj": recurrent.heads}, hidden)
    if recurrent.has_full_gates:
        found.linears(module, {"f_proj": values, "g_proj": values}, hidden)
    else:
        found.linears(module, {"f_a_proj": inner, "g_a_proj": inner}, hidden)
        found.linears(module, {"f_b_proj": values, "g_b_proj": values}, inner)


def _take_convolution(found: ExpectedTensors, module: str, recurrent: RecurrentConfig) -> None:
    """Take the convolution over all channels, or those over queries, keys and values."""
    name, channels, width = "conv1d", recurrent.channels, recurrent.conv_width
    if recurrent.kind == "short_conv":
        name = "conv"
    if found.has(found.at(module, name)):
        found.take(found.at(module, f"{name}.weight"), channels, 1, width)
    else:
        values = recurrent.channels if recurrent.kind == "short_conv" else recurrent.values
        keys = recurrent.key_heads * recurrent.key_dim if recurrent.kind == "gated_delta" else values
        for part, rows in zip(("q_conv1d", "k_conv1d", "v_conv1d"), (keys, keys, values), strict=True):
            found.take(found.at(module, f"{part}.weight"), rows, 1, width)
    if recurrent.conv_bias:
        found.take(found.at(module, f"{name}.bias"), channels)


def _take_decays(found: ExpectedTensors, module: str, recurrent: RecurrentConfig) -> None:
    """Take what makes decays of heads, and the norm of outputs."""
    heads, values, norm = recurrent.heads, recurrent.values, recurrent.value_dim
    is_kimi = recurrent.kind == "kimi_delta"
    decays = (1, 1, heads, 1) if is_kimi and not recurrent.has_full_gates else (heads,)
    found.take(found.at(module, "A_log"), *decays)
    found.take(found.at(module, "dt_bias"), values if is_kimi else heads)
    if recurrent.kind == "mamba2":
        found.take(found.at(module, "D"), heads)
        norm = values if recurrent.norm is not None else 0
    if norm:
        found.take(found.at(module, "o_norm.weight" if is_kimi else "norm.weight"), norm)


def _take_time_steps(found: ExpectedTensors, module: str, recurrent: RecurrentConfig) -> None:
    """Take what makes time steps, keys and queries of Mamba 1."""
    values, rank, keys = recurrent.values, recurrent.step_rank, recurrent.key_dim
    found.linears(module, {"x_proj": rank + 2 * keys}, values)
    found.linears(module, {"dt_proj": values}, rank, bias=True)
    found.take(found.at(module, "A_log"), values, keys)
    found.take(found.at(module, "D"), values)
    for part, width in (("dt", rank), ("b", keys), ("c", keys)) if recurrent.has_step_weights else ():
        found.take(found.at(module, f"{part}_layernorm.weight"), width)


RecurrentRule = Callable[[Fields, int], RecurrentConfig | None]
"""Rule (config.json, number of layers) -> recurrent layers; None for a model without. Raises ModelError."""


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
        layers=(recurrent := recurrent_layers(fields, types, layers, "linear_attention")),
        attention=others(recurrent),
        channels=2 * key_heads * key_dim + heads * value_dim,
        conv_width=conv_width(fields, "linear_conv_kernel_dim", 4),
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        is_interleaved=is_interleaved,
        has_tiled_outputs=fields.flag("linear_values_tiled", default=False),
    )
    return found if any(found.layers) else None


def mamba2_layers(
    fields: Fields, recurrent: tuple[bool, ...], attention: tuple[bool, ...], values: int | None = None
) -> RecurrentConfig | None:
    """Return Mamba-2 layers of `values` numbers; None: `mamba_expand` times the hidden size."""
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    key_dim, what = fields.integer("mamba_d_state", 256), "mamba_d_ssm"
    if values is None:
        values, what = fields.integer("mamba_expand", 2) * fields.integer("hidden_size"), "mamba_expand"
    if values % heads or heads % groups:
        of = "mamba_expand * hidden_size" if what == "mamba_expand" else what
        raise fields.error(
            f"mamba_n_heads {heads} must divide {of} {values} and be a multiple of mamba_n_groups {groups}"
        )
    if fields.raw.get("mamba_d_head") not in (None, "auto", values // heads):
        raise fields.error(f"mamba_d_head {fields.raw['mamba_d_head']!r} is not {values // heads}")
    bias = fields.flag("mamba_proj_bias", default=False)
    found = RecurrentConfig(
        kind="mamba2",
        layers=recurrent,
        attention=attention,
        channels=values + 2 * groups * key_dim,
        conv_width=conv_width(fields, "mamba_d_conv", 4),
        bias=bias,
        out_bias=bias,
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        heads=heads,
        key_heads=groups,
        key_dim=key_dim,
        value_dim=values // heads,
        limits=time_step_limits(fields),
    )
    return found if any(found.layers) else None


def mamba1_layers(
    fields: Fields,
    recurrent: tuple[bool, ...],
    attention: tuple[bool, ...],
    step_norm: StepNorm | None,
    values: int | None = None,
) -> RecurrentConfig | None:
    """Return Mamba 1 layers of `values` channels; None: `mamba_expand` times the hidden size. Each channel is
    a value of a memory that has no heads: groups of channels are called so, for kernels and ranks to share.
    """
    hidden = fields.integer("hidden_size")
    values = values or int(fields.number("mamba_expand", 2) * hidden)
    width = math.gcd(values, CHANNELS_OF_GROUP)
    if width % 2:
        raise fields.error(f"{values} channels of Mamba layers (mamba_expand * hidden_size) must be even")
    rank, key_dim = fields.raw.get("mamba_dt_rank") or "auto", fields.integer("mamba_d_state", 16)
    step_rank = math.ceil(hidden / 16) if rank == "auto" else fields.integer("mamba_dt_rank")
    if max(step_rank, 2 * key_dim) >= hidden:
        raise fields.error(
            f"mamba_dt_rank {step_rank} and twice mamba_d_state {key_dim} must be less than hidden_size "
            f"{hidden}"
        )
    bias = fields.flag("mamba_proj_bias", default=False)
    found = RecurrentConfig(
        kind="mamba1",
        layers=recurrent,
        attention=attention,
        channels=values,
        conv_width=conv_width(fields, "mamba_d_conv", 4),
        bias=bias,
        out_bias=bias,
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        heads=values // width,
        key_heads=1,
        key_dim=key_dim,
        value_dim=width,
        norm=None,
        step_rank=step_rank,
        step_norm=step_norm,
    )
    return found if any(found.layers) else None


def mamba1_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the layers of a Mamba 1 without attention, which are all alike."""
    usual = int(fields.number("mamba_expand", 2) * fields.integer("hidden_size"))
    values = fields.integer("intermediate_size", usual or None)
    return mamba1_layers(fields, (True,) * layers, (False,) * layers, None, values)


def falcon_mamba_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    found = mamba1_recurrence(fields, layers)
    eps = fields.number("mixer_rms_eps", 1e-6)
    return found and replace(found, step_norm="no_weights", norm_eps=eps)


def mamba1_sizes(fields: Fields) -> dict[str, Any]:
    """Return the sizes of attention and MLP, which are not there, as those of groups of channels."""
    found = mamba1_recurrence(fields, 1)
    assert found is not None
    return {
        "num_attention_heads": found.heads,
        "num_key_value_heads": found.heads,
        "head_dim": found.value_dim,
        "intermediate_size": found.values,
    }


CHANNELS_OF_GROUP = 64
"""Channels of Mamba 1 that are computed together: a cache line of a CPU holds 16, a tile of a kernel 64."""


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


NO_ATTENTION = "no layer has attention: models that are recurrent throughout are not supported"


def others(layers: tuple[bool, ...]) -> tuple[bool, ...]:
    return tuple(not is_recurrent for is_recurrent in layers)


def recurrent_layers(fields: Fields, types: Any, layers: int, name: str) -> tuple[bool, ...]:
    """Return True for each layer called `name` in `types`. Raises ModelError, also for a model without
    attention.
    """
    if FULL not in fields.layer_types(types, layers, FULL, name):
        raise fields.error(NO_ATTENTION)
    return tuple(kind == name for kind in types)


def conv_width(fields: Fields, key: str, default: int) -> int:
    width = fields.integer(key, default)
    if not 2 <= width <= MAX_CONV_WIDTH:
        raise fields.error(f"{key} {width} is not supported, only 2 to {MAX_CONV_WIDTH}")
    return width
