"""Names of a checkpoint's tensors in a GGUF file. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from ..errors import ModelError

Names = dict[str, str | tuple[str, ...]]
"""Modules of a layer by their name in a checkpoint: name in GGUF, or several of which a file has one. Where a
checkpoint's name has neither `.weight` nor `.bias`, or is given here with it, the other is whole.
"""

_OUTSIDE: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "model.embed_norm": "token_embd_norm",
    "model.embed_positions": "position_embd",
    "model.embed_types": "token_types",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "head.out_proj": "cls.output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_STACKS: Final = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
"""Lists of matrices outside layers, each of which is one tensor in GGUF."""

_SHARED: Final = {"gate_proj": "ffn_gate_shexp", "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}
LAYER: Final[Names] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm.norms": "attn_q_norm",
    "self_attn.k_layernorm.norms": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "eh_proj": "nextn.eh_proj",
    "hnorm": "nextn.hnorm",
    "enorm": "nextn.enorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    **{
        f"mlp.{module}.{part}": name
        for module in ("shared_expert", "shared_experts", "shared_mlp")
        for part, name in _SHARED.items()
    },
}
_MAMBA: Final[dict[str, str]] = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    **{f"{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
}
SANDWICH: Final[Names] = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names in layers with sandwich norms, or with norms after attention and MLP alone."""
STACKED: Final[Names] = {
    **{name: LAYER[name] for name in LAYER if name not in ("mlp.gate_proj", "mlp.up_proj")},
    "mlp.gate_up_proj": "ffn_up",
}
"""Names where gate and up are one tensor."""
GLM4: Final[Names] = STACKED | {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
GPT: Final[Names] = LAYER | {
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""Names in layers of GPT-2, GPT-NeoX, Phi and Starcoder2."""
FALCON: Final[Names] = LAYER | {
    "input_layernorm": ("attn_norm_2", "attn_norm"),
    "post_attention_layernorm": "attn_norm",
}
LATE_NORM: Final[Names] = LAYER | {"post_attention_layernorm": "post_attention_norm"}
"""Names where the norm before the MLP is called as if it came after attention."""
DELTA: Final[Names] = LATE_NORM | {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": ("ssm_beta", "ssm_ba"),
    "linear_attn.in_proj_a": ("ssm_alpha", "ssm_ba"),
    **{f"linear_attn.{part}": name for part, name in _MAMBA.items() if part not in ("in_proj", "D")},
}
"""Names in layers with gated delta nets."""
GRANITE: Final[Names] = LAYER | {
    **{f"mamba.{part}": name for part, name in _MAMBA.items()},
    "shared_mlp.gate_proj": ("ffn_gate_shexp", "ffn_gate"),
    "shared_mlp.up_proj": ("ffn_up_shexp", "ffn_up"),
    "shared_mlp.output_linear": ("ffn_down_shexp", "ffn_down"),
}
"""Names in layers of a Granite with Mamba-2 or experts."""
SHORT_CONV: Final[Names] = {
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
"""Names in layers of LFM2."""
SHORT_CONV_MOE: Final[Names] = SHORT_CONV | {
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
LLAMA4: Final[Names] = {name.replace("mlp.", "feed_forward."): place for name, place in LAYER.items()}
FALCON_H1: Final[Names] = LLAMA4 | {
    **{f"mamba.{part}": name for part, name in _MAMBA.items()},
    "pre_ff_layernorm.weight": ("ffn_norm", "ffn_norm.weight"),
}
KIMI: Final[Names] = LAYER | {
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{gate}_{step}_proj": f"ssm_{gate}_{step}" for gate in "fg" for step in "ab"},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.A_log": ("ssm_a", "ssm_a.weight"),
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.o_norm": "ssm_norm",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"block_sparse_moe.shared_experts.{part}": name for part, name in _SHARED.items()},
}
"""Names in layers with Kimi delta attention or latent attention."""
BERT: Final[Names] = {
    **{name: place for name, place in LAYER.items() if name.startswith(("self_attn.", "mlp."))},
    "post_attention_layernorm": "attn_output_norm",
    "post_feedforward_layernorm": "layer_output_norm",
}
"""Names in layers of encoders, which `engine/model/encoder.py` calls as those of decoders."""
STACKED_BERT: Final[Names] = {
    **{name: place for name, place in BERT.items() if name not in ("mlp.gate_proj", "mlp.up_proj")},
    "mlp.gate_up_proj": "ffn_up",
}
MIXER: Final[Names] = {
    "norm": "attn_norm",
    **{f"mixer.{part}": name for part, name in _MAMBA.items()},
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
"""Names in layers of which each has one norm: Mamba 1 and 2, and Nemotron-H."""
GEMMA3N: Final[Names] = SANDWICH | {
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.router_norm": "altup_router_norm",
    "altup.modality_router": "altup_router",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}

GEMMA4: Final[Names] = GEMMA3N | {
    "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}

_EXPERT: Final[dict[str, tuple[str, ...]]] = {
    "gate_proj": ("ffn_gate_exps",),
    "up_proj": ("ffn_up_exps",),
    "down_proj": ("ffn_down_exps",),
    "w1": ("ffn_gate_exps",),
    "w3": ("ffn_up_exps",),
    "w2": ("ffn_down_exps",),
    "output_linear": ("ffn_down_exps",),
    "up": ("ffn_up_exps",),
    "down": ("ffn_down_exps",),
    "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
}
EXPERT_PARTS: Final = tuple(_EXPERT)
"""Names of an expert's linears in checkpoints."""
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SUFFIX = re.compile(r"(.+)\.(weight|bias)")
_OF_EXPERT = re.compile(r"(?:(?:mlp|block_sparse_moe|mixer|feed_forward)\.)?experts\.(\d+)\.(\w+)")
_OF_STACK = re.compile(r"model\.(\w+)\.(\d+)")
NOT_NEEDED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
    r"|(blk\.\d+|output)\.(\w+\.)?input_scale|dense_[23]\.(weight|bias)|(v|mm)\..+"
)
"""Tensors that are no part of the transformer: config.json has their content, they are of activations in 4
bits (NVFP4), of dense layers over the pooled vector, or of a vision tower, which Ollama's files have inside.
"""

SCORES: Final = "cls.output.weight"
"""Rows of scores. An encoder's head has them behind another linear, `cls`."""
HEAD: Final = "output.weight"
TABLE: Final = "token_embd.weight"
_Entry = TypeVar("_Entry")


def parts_of_model(tensors: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Return the tensors that are part of the transformer. The rows of scores of a decoder are none."""
    found = {name: entry for name, entry in tensors.items() if not NOT_NEEDED.fullmatch(name)}
    if "cls.weight" not in found:
        found.pop(SCORES, None)
    return found


@dataclass(frozen=True, slots=True)
class GgufTensorPlace:
    """Tensor in a GGUF file. `expert`: index in a stacked tensor. `other`: tensor whose rows alternate with
    its own.
    """

    name: str
    expert: int | None = None
    other: str = ""


def places_of(name: str, of_layer: Names) -> list[GgufTensorPlace]:
    """Look up a checkpoint's tensor: the places where a file may have it. `of_layer`: names of the
    architecture's layers. Raises ModelError.
    """
    whole, kind = name, ""
    if found := _SUFFIX.fullmatch(name):
        whole, kind = found[1], f".{found[2]}"
    if found := _IN_LAYER.fullmatch(whole):
        layer, inside = found.groups()
        if expert := _OF_EXPERT.fullmatch(inside):
            number, part = expert.groups()
            if part in _EXPERT:
                first, *others = (f"blk.{layer}.{each}{kind}" for each in _EXPERT[part])
                apart = GgufTensorPlace(first, int(number), others[0] if others else "")
                stack = GgufTensorPlace(f"blk.{layer}.ffn_gate_up_exps{kind}", int(number))
                return [apart, stack] if others else [apart]
        elif known := of_layer.get(f"{inside}{kind}"):
            return [GgufTensorPlace(f"blk.{layer}.{each}") for each in _each(known)]
        elif known := of_layer.get(inside):
            return [GgufTensorPlace(f"blk.{layer}.{each}{kind}") for each in _each(known)]
    elif whole in _OUTSIDE:
        return [GgufTensorPlace(f"{_OUTSIDE[whole]}{kind}")]
    elif (found := _OF_STACK.fullmatch(whole)) and found[1] in _STACKS:
        return [GgufTensorPlace(f"{_STACKS[found[1]]}{kind}", int(found[2]))]
    raise ModelError(f"where a GGUF file has {name} is not known: this architecture cannot be read from one")


def _each(known: str | tuple[str, ...]) -> tuple[str, ...]:
    return (known,) if isinstance(known, str) else known
