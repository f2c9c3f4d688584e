"""Rules by which the config.json of each hybrid family names its recurrent layers, and sizes beside them."""

import math
from dataclasses import replace
from typing import Any

from ..attention import SLIDING, Windows, window_of
from ..families.deepseek import deepseek_sizes
from ..fields import MAX_LAYERS, MAX_WIDTH, Fields, show
from ..moe import (
    ExpertsConfig,
    deepseek_experts,
    integer,
    layers_after_dense,
    read_experts,
    selected_by,
)
from .config import (
    FULL,
    NO_ATTENTION,
    GatedNorm,
    RecurrentConfig,
    SharedBlocksConfig,
    conv_width,
    gated_delta_nets,
    mamba1_layers,
    mamba2_layers,
    others,
    recurrent_layers,
)


def lfm2_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the short convolutions of `layer_types`, or of all layers but `full_attn_idxs`."""
    types = fields.raw.get("layer_types")
    if types is None:
        full = fields.raw.get("full_attn_idxs")
        full = list(range(layers)) if full is None else full
        full = fields.layer_numbers("full_attn_idxs", full, layers)
        types = [FULL if layer in full else "conv" for layer in range(layers)]
    found = RecurrentConfig(
        kind="short_conv",
        layers=(recurrent := recurrent_layers(fields, types, layers, "conv")),
        attention=others(recurrent),
        channels=fields.integer("hidden_size"),
        conv_width=conv_width(fields, "conv_L_cache", 3),
        bias=(bias := fields.flag("conv_bias", default=False)),
        out_bias=bias,
        conv_bias=bias,
    )
    return found if any(found.layers) else None


def lfm3_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the short convolutions of `layer_types`, beside attention with a window or without."""
    types = fields.raw["layer_types"]
    if isinstance(types, list):
        types = [FULL if kind == SLIDING else kind for kind in types]
    fields = fields.replace(layer_types=types)
    return lfm2_recurrence(fields, layers)


def lfm3_sizes(fields: Fields) -> dict[str, Any]:
    """Return the kind of each layer, by default a window, a convolution or full attention in turns."""
    if fields.raw.get("layer_types") is not None:
        return {}
    layers = range(fields.integer("num_hidden_layers"))
    kinds = {2: FULL, 0: SLIDING}
    return {"layer_types": [kinds.get(layer % 4, "conv") if layer else "conv" for layer in layers]}


def lfm3_windows(fields: Fields, layers: int) -> Windows:
    window, types = window_of(fields), fields.raw["layer_types"]
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error(f"layer_types must name the kind of each of {layers} layers")
    return tuple(window if kind == SLIDING else None for kind in types)


def olmo_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the gated delta nets of OLMo-hybrid, whose sizes follow from the heads of attention."""
    heads, raw = fields.integer("num_attention_heads"), dict(fields.raw)
    for what in ("key", "value"):
        raw[f"linear_num_{what}_heads"] = fields.integer(f"linear_num_{what}_heads", heads)
    keys = fields.integer(
        "linear_key_head_dim", int(0.75 * fields.integer("hidden_size") / raw["linear_num_key_heads"]) or None
    )
    raw |= {"linear_key_head_dim": keys}
    raw["linear_value_head_dim"] = fields.integer("linear_value_head_dim", 2 * keys)
    found = gated_delta_nets(Fields(raw, fields.where), layers, is_interleaved=False)
    if found is None:
        raise fields.error("layer_types names no linear_attention, which every OLMo-hybrid has")
    beta = 2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0
    return replace(found, beta=beta, norm_eps=1e-5)


def kimi_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the layers of Kimi delta attention: `layer_types`, or the lists of `linear_attn_config`."""
    inner = Fields(fields.mapping("linear_attn_config") or {}, f"{fields.where}: linear_attn_config")

    def size(key: str, name: str, default: int) -> int:
        return inner.integer(name) if inner.raw.get(name) is not None else fields.integer(key, default)

    types = fields.raw.get("layer_types")
    if types is None and inner.raw:
        types = kimi_layers(inner, layers)
    if types is None:
        types = [FULL if layer and layer % 4 == 0 else "linear_attention" for layer in range(layers)]
    heads, dim = size("linear_num_heads", "num_heads", 32), size("linear_head_dim", "head_dim", 128)
    is_conv_inside = inner.raw.get("short_conv_kernel_size") is not None
    found = RecurrentConfig(
        kind="kimi_delta",
        layers=(recurrent := recurrent_layers(fields, types, layers, "linear_attention")),
        attention=others(recurrent),
        channels=3 * heads * dim,
        conv_width=conv_width(inner, "short_conv_kernel_size", 4)
        if is_conv_inside
        else conv_width(fields, "linear_conv_kernel_dim", 4),
        heads=heads,
        key_heads=heads,
        key_dim=dim,
        value_dim=dim,
    )
    return found if any(found.layers) else None


def ling_sizes(fields: Fields) -> dict[str, Any]:
    """Return the sizes of latent attention, and the heads of Kimi delta attention, which are as many."""
    return {
        **deepseek_sizes(fields),
        "linear_head_dim": fields.integer("linear_head_dim", fields.integer("head_dim", 128)),
        "linear_num_heads": fields.integer("linear_num_heads", fields.integer("num_attention_heads")),
    }


def ling_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the layers of Ling 3: all but the last of each `layer_group_size`, with bounded decays."""
    size, raw = fields.integer("layer_group_size", 6), dict(fields.raw)
    if raw.get("layer_types") is None:
        raw["layer_types"] = ["linear_attention" if (n + 1) % size else FULL for n in range(layers)]
    raw["linear_conv_kernel_dim"] = fields.integer("short_conv_kernel_size", 4)
    found = kimi_recurrence(Fields(raw, fields.where), layers)
    least = fields.number("kda_lower_bound", -5.0) if fields.flag("kda_safe_gate", default=True) else 0.0
    if not -80.0 <= least <= 0.0:
        raise fields.error(f"kda_lower_bound {least} must be from -80 to 0")
    return found and replace(found, has_full_gates=True, limits=(least, math.inf))


def kimi_layers(inner: Fields, layers: int) -> list[str]:
    """Return the kind of each layer by `kda_layers` and `full_attn_layers`, which count from 1."""
    kinds = {"kda_layers": "linear_attention", "full_attn_layers": FULL}
    found = dict[int, str]()
    for key, kind in kinds.items():
        numbers = inner.raw.get(key)
        if not isinstance(numbers, list) or not all(type(n) is int and 1 <= n <= layers for n in numbers):
            raise inner.error(f"{key} must be a list of layers from 1 to {layers}")
        found |= dict.fromkeys(numbers, kind)
    if len(found) != layers or sum(len(inner.raw[key]) for key in kinds) != layers:
        raise inner.error(f"kda_layers and full_attn_layers must name each of {layers} layers once")
    return [found[layer] for layer in range(1, layers + 1)]


def granite_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the Mamba-2 layers of `layer_types`, which older files call otherwise."""
    types = fields.raw.get("layer_types") or fields.raw.get("layers_block_type") or ["mamba"] * layers
    known = {"linear_attention": "mamba", "attention": FULL}
    if isinstance(types, list):
        types = [known.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    recurrent = recurrent_layers(fields, types, layers, "mamba")
    return mamba2_layers(fields, recurrent, others(recurrent))


def bamba_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the Mamba-2 layers, which are all but `attn_layer_indices`."""
    key = "attn_layer_indices"
    full = fields.layer_numbers(key, fields.raw.get(key) or [], layers)
    if not full:
        raise fields.error(f"attn_layer_indices names no layer: {NO_ATTENTION}")
    recurrent = tuple(layer not in full for layer in range(layers))
    return mamba2_layers(fields, recurrent, others(recurrent))


def falcon_h1_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return Mamba-2 beside the attention of every layer."""
    values = None if fields.raw.get("mamba_d_ssm") is None else fields.integer("mamba_d_ssm")
    found = mamba2_layers(fields, (True,) * layers, (True,) * layers, values)
    if not fields.flag("mamba_rms_norm", default=False):
        norm: GatedNorm | None = None
    else:
        norm = "norm_first" if fields.flag("mamba_norm_before_gate", default=True) else "gate_first"
    return found and replace(found, norm=norm, out_bias=fields.flag("projectors_bias", default=False))


def nemotron_h_recurrence(fields: Fields, _layers: int) -> RecurrentConfig | None:
    """Return the Mamba-2 layers of Nemotron-H; its layers of MLP and experts have neither state nor KV."""
    kinds = nemotron_h_layers(fields)
    if FULL not in kinds:
        raise fields.error(NO_ATTENTION)
    recurrent, attention = (tuple(kind == wanted for kind in kinds) for wanted in ("linear_attention", FULL))
    values = fields.integer("mamba_n_heads") * fields.integer("mamba_head_dim", 64)
    return mamba2_layers(fields.replace(mamba_d_head="auto"), recurrent, attention, values)


def mamba2_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the layers of a Mamba-2 without attention, which are all alike."""
    heads, head_dim = fields.integer("mamba_n_heads"), fields.integer("head_dim", 64)
    if fields.number("expand", 2) * fields.integer("hidden_size") != heads * head_dim:
        raise fields.error(f"num_heads {heads} of head_dim {head_dim} are not expand * hidden_size")
    return mamba2_layers(
        fields.replace(mamba_d_head="auto"), (True,) * layers, (False,) * layers, heads * head_dim
    )


def mamba2_sizes(fields: Fields) -> dict[str, Any]:
    """Return the sizes of attention and MLP, which are not there, as those of the Mamba-2 heads."""
    heads, head_dim = fields.integer("mamba_n_heads"), fields.integer("head_dim", 64)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": heads * head_dim,
    }


ZAMBA2_LAYERS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}


def zamba2_layers(fields: Fields) -> list[str]:
    """Return the kind of each layer, mamba or hybrid. Raises ModelError."""
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    usual = {*range(6, 43, 6), 47, 51}
    types = fields.raw.get("layers_block_type") or ["hybrid" if n in usual else "mamba" for n in range(54)]
    is_list = isinstance(types, list) and len(types) == layers
    if not is_list or not all(str(each) in ZAMBA2_LAYERS for each in types):
        raise fields.error(f"layers_block_type must name mamba or hybrid for each of {layers} layers")
    named = [ZAMBA2_LAYERS[each] for each in types]
    if "hybrid" not in named:
        raise fields.error(NO_ATTENTION)
    return named


def zamba2_sizes(fields: Fields) -> dict[str, Any]:
    """Return the heads of attention, which together are twice as wide as a row, and the longest text."""
    width, heads = 2 * fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if width % heads:
        raise fields.error(f"num_attention_heads {heads} must divide twice hidden_size {width // 2}")
    is_long = fields.flag("use_long_context", default=False)
    return {"head_dim": width // heads, **({"max_position_embeddings": 16384} if is_long else {})}


def zamba2_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return Mamba-2 in all layers, some of which have attention of a shared block before it."""
    limits, kinds = [fields.number("time_step_min", 0.001), math.inf], zamba2_layers(fields)
    if limits[0] < 0:
        raise fields.error(f"time_step_min {limits[0]} must be from 0 on")
    changed = {"time_step_limit": limits, "mamba_d_head": "auto", "mamba_conv_bias": True}
    has_attention = tuple(kind == "hybrid" for kind in kinds)
    found = mamba2_layers(fields.replace(**changed), (True,) * layers, has_attention)
    return found and replace(found, norm_eps=1e-5)


def zamba2_shared(fields: Fields) -> SharedBlocksConfig:
    """Return the layers with a block that is shared, and sizes of the adapters."""
    layers = tuple(layer for layer, kind in enumerate(zamba2_layers(fields)) if kind == "hybrid")
    adapts = fields.flag("use_shared_attention_adapter", default=False)
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if adapts and heads != kv_heads:
        raise fields.error("use_shared_attention_adapter with fewer KV heads than heads is not supported")
    return SharedBlocksConfig(
        layers=layers,
        blocks=min(fields.integer("num_mem_blocks", 1), len(layers)),
        rank=fields.integer("adapter_rank", 128, most=MAX_WIDTH),
        adapts_attention=adapts,
    )


def jamba_recurrence(fields: Fields, layers: int) -> RecurrentConfig | None:
    """Return the Mamba 1 layers of `layer_types`, or of all layers but one in each `attn_layer_period`."""
    types = fields.raw.get("layer_types")
    if types is None:
        full = in_each_period(fields, layers, "attn_layer", (8, 4))
        types = [FULL if is_full else "linear_attention" for is_full in full]
    recurrent = recurrent_layers(fields, types, layers, "linear_attention")
    return mamba1_layers(fields, recurrent, others(recurrent), "weights")


def in_each_period(fields: Fields, layers: int, key: str, usual: tuple[int, int]) -> tuple[bool, ...]:
    """Return True for one layer of each `key`_period, that at `key`_offset. `usual`: their defaults."""
    period = fields.integer(f"{key}_period", usual[0])
    offset = fields.raw.get(f"{key}_offset", usual[1])
    if type(offset) is not int or not 0 <= offset < period:
        raise fields.error(f"{key}_offset {show(offset)} must be from 0 to {key}_period - 1 = {period - 1}")
    return tuple(layer % period == offset for layer in range(layers))


def jamba_sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for the layers of `mlp_layer_types`, or for one of each `expert_layer_period`."""
    if fields.raw.get("mlp_layer_types") is not None:
        return layers_after_dense(fields, layers)
    return in_each_period(fields, layers, "expert_layer", (2, 1))


def jamba_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read experts of a softmax over all of them; None for a Jamba with one expert, which is an MLP."""
    rule = read_experts(
        selected_by("num_experts"),
        jamba_sparse_layers,
        inner="intermediate_size",
        normalized=False,
        router="router",
    )
    return None if fields.raw.get("num_experts") in (0, 1) else rule(fields, layers)


def granite_sizes(fields: Fields) -> dict[str, Any]:
    """Return the MLP's intermediate size, which Granite's files call that of the shared expert."""
    shared = fields.integer("shared_intermediate_size", 1024)
    return {"intermediate_size": shared, "expert_intermediate_size": fields.raw.get("intermediate_size")}


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


NEMOTRON_LAYERS = {
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""Other names of the kinds of layers of Nemotron-H: letters of `hybrid_override_pattern`, and older ones."""


def nemotron_h_layers(fields: Fields) -> list[str]:
    """Return the kind of each layer: linear_attention, full_attention, moe or mlp. Raises ModelError."""
    key = next((k for k in ("layers_block_type", "layer_types") if fields.raw.get(k) is not None), "")
    types: Any = fields.raw[key] if key else list(fields.text("hybrid_override_pattern"))
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        types = []
    named: list[str] = [NEMOTRON_LAYERS.get(kind, kind) for kind in types]
    if not named or not set(named) <= set(NEMOTRON_LAYERS.values()):
        raise fields.error(
            f"{key or 'hybrid_override_pattern'} must name the kind of each layer: "
            f"{', '.join(sorted(set(NEMOTRON_LAYERS.values())))}, or M, *, E and - in a pattern"
        )
    return named


def nemotron_h_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read the experts of Nemotron-H, which have no gates and may work on narrower rows."""
    sparse = tuple(kind == "moe" for kind in nemotron_h_layers(fields))
    if not any(sparse):
        return None
    if fields.flag("mlp_bias", default=False):
        raise fields.error("mlp_bias is not supported with experts")
    return deepseek_experts(
        fields,
        layers,
        lambda _fields, _layers: sparse,
        scoring="sigmoid",
        group_best=2,
        correction="gate.e_score_correction_bias",
        shared_inner=integer("moe_shared_expert_intermediate_size"),
        module="mixer",
        projections=("", "up_proj", "down_proj"),
        latent=fields.integer("moe_latent_size", 0),
    )


def nemotron_h_sizes(fields: Fields) -> dict[str, Any]:
    """Return the number of layers, which follows from their kinds."""
    return {"num_hidden_layers": len(nemotron_h_layers(fields))}
