"""Tensor names: from those of a checkpoint (transformers) to those of GGUF (llama.cpp)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..errors import ModelError

_OUTSIDE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
SANDWICH: Final = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names in layers with sandwich norms."""
_EXPERT: Final = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OF_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_OUTSIDE_LAYERS = re.compile(r"(.+)\.(weight|bias)")
NOT_NEEDED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)
"""Tensors that are ignored: config.json has their content."""


@dataclass(frozen=True, slots=True)
class Place:
    """Tensor in a GGUF file. `expert`: index in a stacked tensor."""

    name: str
    expert: int | None = None


def place_of(name: str, of_layer: Mapping[str, str]) -> Place:
    """Look up a checkpoint's tensor. `of_layer`: names of the architecture's layers. Raises ModelError."""
    if found := _IN_LAYER.fullmatch(name):
        layer, inside, kind = found.groups()
        if expert := _OF_EXPERT.fullmatch(inside):
            number, part = expert.groups()
            if part in _EXPERT:
                return Place(f"blk.{layer}.{_EXPERT[part]}.{kind}", int(number))
        elif inside in of_layer:
            return Place(f"blk.{layer}.{of_layer[inside]}.{kind}")
    elif (found := _OUTSIDE_LAYERS.fullmatch(name)) and found[1] in _OUTSIDE:
        return Place(f"{_OUTSIDE[found[1]]}.{found[2]}")
    raise ModelError(f"where a GGUF file has {name} is not known: this architecture cannot be read from one")
