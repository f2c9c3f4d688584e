"""Names of tensors: those of a causal language model, for names that families give them in checkpoints."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from ..errors import ModelError
from .safetensors import TensorEntry, shown

_INSIDE, _TABLE = "model.", "embed_tokens.weight"
_LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.backbone.embeddings.": "model.embed_tokens.",
    "language_model.backbone.norm_f.": "model.norm.",
    "language_model.backbone.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.output.": "output.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
"""Prefixes of the language model in vision-language checkpoints (three styles), and of text-only ones."""
VISION = tuple(
    f"{at}{part}"
    for at in ("", "model.")
    for part in (
        *(
            "vision_tower.",
            "vision_model.",
            "vision_encoder.",
            "vision_embedder.",
            "embed_vision.",
            "visual.",
            "multi_modal_projector.",
            "mm_projector.",
            "vision_adapter.",
            "vision_projection.",
            "merger.",
            "connector.",
            "vision_projector.",
            "projector.",
            "vit_large_projector.",
            "image_newline",
            "visual_embeddings_table.",
            "mlp_AR.",
        ),
        *(
            "audio_tower.",
            "embed_audio.",
            "sound_encoder.",
            "sound_projection.",
            "mlp1.",
            "embed_tokens_extend.",
        ),
    )
)
_THINKER: Final = "thinker."
"""Prefix of the part of a Qwen-Omni that makes text. Others make speech."""
_BASE: Final = ".base_layer."
"""Part of the names of linears for which a checkpoint has adapters too, as Phi-4-multimodal for images and
speech. Texts do not pass these."""
_ADAPTED: Final = re.compile(r"\.lora_[AB]\.")
_INNER_TOWER = "vision_tower.vision_model."
_LIGHTON: Final = {"vision_encoder.": "vision_tower.", "vision_projection.": "multi_modal_projector."}
"""Parts of LightOnOCR, and those of Mistral 3."""
_SPELLED = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".mamba_decoder.": ".",
    ".moe.router.expert_bias": ".mlp.gate.e_score_correction_bias",
}
"""Parts of names in checkpoints of Nemotron-H, OLMo-hybrid, Zamba2 and Kolibri 1, and those of others."""
_DENSE: Final = {".dense_h_to_4h.": ".up_proj.", ".dense_4h_to_h.": ".down_proj."}
_OPT_LAYER: Final = {
    ".self_attn_layer_norm.": ".input_layernorm.",
    ".final_layer_norm.": ".post_attention_layernorm.",
    ".out_proj.": ".o_proj.",
    ".fc1.": ".mlp.up_proj.",
    ".fc2.": ".mlp.down_proj.",
}
_INTERNLM2: Final = "model.tok_embeddings.weight"
_SPELLED_BY: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt_neox.embed_in.weight": {
        "gpt_neox.embed_in.": "model.embed_tokens.",
        "gpt_neox.final_layer_norm.": "model.norm.",
        "gpt_neox.": "model.",
        "embed_out.": "lm_head.",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        **_DENSE,
    },
    "transformer.word_embeddings.weight": {
        "transformer.word_embeddings.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.",
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".ln_attn.": ".input_layernorm.",
        ".ln_mlp.": ".post_attention_layernorm.",
        **_DENSE,
    },
    "wte.weight": {
        "wte.": "model.embed_tokens.",
        "wpe.": "model.embed_positions.",
        "ln_f.": "model.norm.",
        "h.": "model.layers.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_attn.": ".self_attn.qkv_proj.",
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".attn.attention.": ".attn.",
        **{f".attn.{part}_proj.": f".self_attn.{part}_proj." for part in "qkv"},
        ".attn.out_proj.": ".self_attn.o_proj.",
        ".c_fc_0.": ".gate_proj.",
        ".c_fc_1.": ".up_proj.",
        ".c_fc.": ".up_proj.",
        ".c_proj.": ".down_proj.",
        ".fc_in.": ".up_proj.",
        ".fc_out.": ".down_proj.",
    },
    "model.word_embeddings.weight": {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
        ".attention.": ".self_attn.",
        ".gate.expert_bias": ".gate.e_score_correction_bias",
    },
    _INTERNLM2: {
        "model.tok_embeddings.": "model.embed_tokens.",
        "output.": "lm_head.",
        ".attention.wqkv.": ".self_attn.qkv_proj.",
        ".attention.wo.": ".self_attn.o_proj.",
        ".attention_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
        ".feed_forward.w2.": ".mlp.down_proj.",
    },
    "model.decoder.embed_tokens.weight": {
        "model.decoder.final_layer_norm.": "model.norm.",
        "model.decoder.": "model.",
        **_OPT_LAYER,
    },
    "biogpt.embed_tokens.weight": {
        "biogpt.layer_norm.": "model.norm.",
        "biogpt.": "model.",
        "output_projection.": "lm_head.",
        **_OPT_LAYER,
    },
}
"""The same for GPT-NeoX, Falcon, the GPT-2 family (`_GPT2`), Ling, InternLM 2, OPT and BioGPT, by the name of
their embedding."""
_GPT2: Final = "transformer.", "wte.weight"
"""Prefix that some checkpoints have, and the embedding of GPT-2, GPT-Neo, GPT-J, GPTBigCode and EXAONE 3."""
_OPT: Final = "decoder.embed_tokens.weight"
"""Embedding of an OPT as it was published, without `model.`."""
_OF_OTHER_SPELLING = (
    *("backbone.embeddings.weight", "model.embeddings.weight", ".attention_layer_norm.weight"),
    *(".moe.router.expert_bias", ".mamba_decoder.input_layernorm.weight"),
)


def is_of_vision(name: str) -> bool:
    return name.removeprefix(_THINKER).startswith(VISION)


def vision_name(name: str) -> str:
    name = name.removeprefix(_THINKER).removeprefix(_INSIDE)
    for own, usual in _LIGHTON.items():
        if name.startswith(own):
            return usual + name.removeprefix(own)
    return f"vision_tower.{name.removeprefix(_INNER_TOWER)}" if name.startswith(_INNER_TOWER) else name


def full_names(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors by their names in a causal language model. A checkpoint without a head omits the
    prefix `model.`, a vision-language checkpoint has longer prefixes.
    """
    if any(name.startswith(_THINKER) for name in entries):
        entries = {name: entry for name, entry in entries.items() if name.startswith(_THINKER)}
        return full_names(renamed(entries, lambda name: name.removeprefix(_THINKER)))
    if any(_BASE in name for name in entries):
        entries = {name: entry for name, entry in entries.items() if not _ADAPTED.search(name)}
        return full_names(renamed(entries, lambda name: name.replace(_BASE, ".")))
    if any(name.startswith((*_LANGUAGE, *VISION)) for name in entries):
        entries = language_part(entries)
        if _INTERNLM2 not in entries:
            return entries
    if any(name.endswith(_OF_OTHER_SPELLING) for name in entries):
        return renamed(entries, usual_name)
    prefix, table = _GPT2
    if prefix + table in entries:
        entries = renamed(entries, lambda name: name.removeprefix(prefix))
    if _OPT in entries:
        entries = renamed(entries, lambda name: f"{_INSIDE}{name}" if name.startswith("decoder.") else name)
    for sign, parts in _SPELLED_BY.items():
        if sign in entries:
            return inputs_first(renamed(entries, partial(respelled, parts)))
    if f"{_INSIDE}{_TABLE}" in entries or _TABLE not in entries:
        return dict(entries)
    return {
        name if name.startswith("lm_head.") else f"{_INSIDE}{name}": entry for name, entry in entries.items()
    }


def inputs_first(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return entries with the linears of a GPT-2 as [outputs, inputs]: its stack of queries,
    keys and values shows that inputs come first. Others are returned as they are.
    """
    stack = entries.get("model.layers.0.self_attn.qkv_proj.weight")
    if stack is None or len(stack.shape) != 2 or stack.shape[0] >= stack.shape[1]:
        return dict(entries)
    return {
        name: replace(entry, shape=entry.shape[::-1], is_transposed=True)
        if name.endswith("_proj.weight") and len(entry.shape) == 2
        else entry
        for name, entry in entries.items()
    }


def language_part(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    return renamed(
        {name: entry for name, entry in entries.items() if not name.startswith(VISION)}, inner_name
    )


def usual_name(name: str) -> str:
    return respelled(_SPELLED, name)


def respelled(parts: Mapping[str, str], name: str) -> str:
    """Return a name with these parts replaced in order; those without a dot before them begin it."""
    for part, usual in parts.items():
        if part[0] == ".":
            name = name.replace(part, usual)
        elif name.startswith(part):
            name = usual + name.removeprefix(part)
    return name


def nemotron_h_name(name: str) -> str:
    """Return the name that published checkpoints of Nemotron-H have for a tensor."""
    for part, usual in _SPELLED.items():
        if part.startswith("backbone.") and name.startswith(usual):
            return part + name.removeprefix(usual)
    return name


def names_in_files(entries: Mapping[str, TensorEntry]) -> Callable[[str], str]:
    """Return the function from a tensor's name to the one in the files of a text-only checkpoint, also for
    the parts of a quantized linear. Names stay where files have another order of rows and columns.
    """
    stays = any(
        each.is_transposed or each.name.startswith((*_LANGUAGE, *VISION, _THINKER)) or _BASE in each.name
        for each in entries.values()
    )

    def name_in_files(name: str) -> str:
        module, _, part = name.rpartition(".")
        entry = entries.get(name) or entries.get(f"{module}.weight")
        if stays or entry is None:
            return name
        return f"{entry.name.rpartition('.')[0]}.{part}"

    return name_in_files


def renamed(entries: Mapping[str, TensorEntry], name_of: Callable[[str], str]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        inner = name_of(name)
        if inner in found:
            raise ModelError(
                f"{entry.file}: {shown(name)} and {shown(found[inner].name)} are the same tensor: refused, "
                "fetch another copy of the model"
            )
        found[inner] = entry
    return found


def inner_name(name: str) -> str:
    """Return the name in a text-only checkpoint of a tensor of the language model."""
    for prefix, inner in _LANGUAGE.items():
        if name.startswith(prefix):
            return inner + name.removeprefix(prefix)
    return name
