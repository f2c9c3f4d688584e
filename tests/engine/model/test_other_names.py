"""Models under other names than those of transformers, and with tensors that nothing needs, as published."""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.expected_tensors import check_weights
from llmbox.engine.planning.performance_model import rank_shape
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.quant_formats import QUANTS
from support.families import COMMON, LATENT, MOE, make_family, randomize
from support.rank_threads import load_ranks
from support.real_engines import (
    PROMPT,
    compare,
    hf_model,
    load,
    tokens,
)
from support.renamed_models import BLOCKS, DECILM, Weights, make_decilm, rewrite
from support.tiny_models import make_tiny_model


def respelled(weights: Weights, parts: Mapping[str, str]) -> Weights:
    found = {}
    for name, tensor in weights.items():
        for usual, own in parts.items():
            name = name.replace(usual, own)  # noqa: PLW2901
        found[name] = tensor
    return found


EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def stacked_by_group(weights: Weights) -> Weights:
    """Return weights with the queries, the key and the value of each KV head in turn as one tensor."""
    found = respelled(weights, INTERNLM2)
    heads, kv_heads, dim = (
        COMMON[f"{key}"] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    for name in [name for name in found if ".q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        rows = heads // kv_heads, 1, 1
        groups = [part.view(kv_heads, n * dim, -1) for part, n in zip(parts, rows, strict=True)]
        stack = torch.cat(groups, 1).flatten(0, 1)
        found[name.replace("self_attn.q_proj", "attention.wqkv")] = (
            stack if name.endswith("weight") else stack[:, 0]
        )
    return found


LLAMAS: dict[str, tuple[dict[str, Any], Callable[[Weights], Weights], dict[str, Any]]] = {
    "exaone.ExaoneForCausalLM": (
        {"tie_word_embeddings": True},
        lambda weights: respelled(weights, EXAONE),
        {"num_layers": 2, "num_hidden_layers": None, "layer_norm_epsilon": 1e-6, "rms_norm_eps": None}
        | {"activation_function": "silu", "hidden_act": None, "head_dim": None, "tie_word_embeddings": None},
    ),
    "internlm2.InternLM2ForCausalLM": (
        {"attention_bias": True},
        stacked_by_group,
        {"bias": True, "attention_bias": None, "head_dim": None},
    ),
    "internlm2.InternLM2ForCausalLM-plain": (
        {},
        stacked_by_group,
        {"bias": False, "attention_bias": None, "head_dim": None},
    ),
    "internlm3.InternLM3ForCausalLM": (
        {"attention_bias": True, "mlp_bias": True},
        dict,
        {"qkv_bias": True, "bias": True, "attention_bias": None, "mlp_bias": None},
    ),
    "internlm3.InternLM3ForCausalLM-qkv": (
        {"attention_bias": True},
        lambda weights: {name: x for name, x in weights.items() if not name.endswith("o_proj.bias")},
        {"qkv_bias": True, "bias": False, "attention_bias": None, "mlp_bias": None},
    ),
    "iquestcoder.IQuestCoderForCausalLM": ({"attention_bias": True}, dict, {"use_sliding_window": False}),
}
"""Fields of a Llama, its tensors as the family has them, and keys; by the class in `auto_map`."""


@pytest.mark.parametrize("name", LLAMAS)
def test_a_llama_under_other_names(tmp_path: Path, name: str) -> None:
    """Code of these families is in their repositories: it computes what Llama does."""
    fields, changed, keys = LLAMAS[name]
    model = make_family(tmp_path, "llama", **fields)
    if name.endswith("-qkv"):  # a Llama has a bias there too
        rewrite(model, lambda ws: {n: 0 * x if n.endswith("o_proj.bias") else x for n, x in ws.items()}, {})
    theirs = hf_model(model)
    module, kind = name.partition("-")[0].split(".")
    own = {"architectures": [kind], "model_type": module}
    own["auto_map"] = {"AutoModelForCausalLM": f"modeling_{module}.{kind}"}
    rewrite(model, changed, own | keys)
    config = parse_config(model)
    check_weights(str(model), config, list_tensors(model))
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    compare(model, theirs)


def test_a_minicpm_is_a_granite_with_other_multipliers(tmp_path: Path) -> None:
    """MiniCPM divides by widths and depths where Granite has the numbers."""
    scales = {"embedding_multiplier": 6.0, "residual_multiplier": 1.4 / 2**0.5, "attention_multiplier": 0.25}
    model = make_family(tmp_path, "granite", **scales, logits_scaling=64 / 48, tie_word_embeddings=True)
    theirs = hf_model(model)
    own = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
    own |= {"auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"}}
    own |= {"scale_emb": 6, "scale_depth": 1.4, "dim_model_base": 48}
    own |= dict.fromkeys((*scales, "logits_scaling", "tie_word_embeddings"))
    rewrite(model, dict, own)
    check_weights(str(model), parse_config(model), list_tensors(model))
    compare(model, theirs)
    rewrite(model, dict, {"sparse_config": {"topk": 64}})
    with pytest.raises(ModelError, match="sparse_config asks for sparse attention"):
        parse_config(model)


MASK = torch.ones(1, 1, 256, 256).bool().tril()
MASKS: list[tuple[str, dict[str, Tensor]]] = [
    (
        "gpt2",
        {"transformer.h.0.attn.bias": MASK.float(), "transformer.h.1.attn.masked_bias": MASK[0, 0, 0, 0]},
    ),
    ("gpt_bigcode", {"transformer.h.0.attn.bias": MASK, "transformer.h.0.attn.masked_bias": torch.ones(())}),
    ("gpt_neo", {"transformer.h.0.attn.attention.bias": MASK.to(torch.uint8)}),
    ("gpt_neo", {"transformer.h.1.attn.attention.masked_bias": torch.ones(())}),
    ("gptj", {"transformer.h.0.attn.bias": MASK, "transformer.h.0.attn.masked_bias": torch.ones(())}),
    ("gpt_neox", {"gpt_neox.layers.0.attention.bias": MASK}),
    ("gpt_neox", {"gpt_neox.layers.0.attention.masked_bias": torch.ones(())}),
    ("gpt_neox", {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4)}),
]
"""Buffers that published checkpoints have."""


@pytest.mark.parametrize(("arch", "buffers"), MASKS)
def test_buffers_of_published_checkpoints_are_ignored(
    tmp_path: Path, arch: str, buffers: dict[str, Tensor]
) -> None:
    model = make_family(tmp_path, arch)
    expected = tokens(load(model), [PROMPT])
    rewrite(model, lambda weights: weights | buffers, {})
    check_weights(str(model), parse_config(model), list_tensors(model))
    assert tokens(load(model), [PROMPT]) == expected
    rewrite(model, lambda weights: weights | {f"{next(iter(buffers))}_2": torch.ones(2)}, {})
    with pytest.raises(ModelError, match="has no place in the architecture"):
        check_weights(str(model), parse_config(model), list_tensors(model))
    with pytest.raises(ModelError, match="has no place in the architecture"):
        load(model)


def test_an_opt_as_it_was_published(tmp_path: Path) -> None:
    """Its names have no `model.`."""
    model = make_family(tmp_path, "opt")
    expected = tokens(load(model), [PROMPT])
    rewrite(model, lambda weights: respelled(weights, {"model.decoder": "decoder"}), {})
    check_weights(str(model), parse_config(model), list_tensors(model))
    assert tokens(load(model), [PROMPT]) == expected


OMNI_TOWERS = {
    "qwen2_5_omni": (
        {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
        | {"patch_size": 4, "fullatt_block_indexes": [0]},
        {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
        | {"output_dim": 64},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}},
    ),
    "qwen3_omni_moe": (
        {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
        | {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
        {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
        | {"output_dim": 64, "downsample_hidden_size": 8},
        MOE | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}},
    ),
}
"""Vision and audio towers, and fields of the text part."""
OMNI = {
    "qwen2_5_omni": ["Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"],
    "qwen3_omni_moe": ["Qwen3OmniMoeForConditionalGeneration"],
}
"""Classes in published files."""


@pytest.mark.parametrize("arch", OMNI)
def test_the_text_of_a_qwen_omni(tmp_path: Path, arch: str) -> None:
    """The files of a whole model have its thinker below a prefix, beside the part that speaks."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision, audio, text = OMNI_TOWERS[arch]
    config = AutoConfig.for_model(
        f"{arch}_thinker",
        text_config=COMMON | text,
        vision_config=vision,
        audio_config=audio,
        tie_word_embeddings=False,
    )
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    randomize(theirs, 0)
    theirs.save_pretrained(tmp_path)
    alone, thinker = parse_config(tmp_path), json.loads((tmp_path / "config.json").read_text())
    compare(tmp_path, theirs)
    whole = {"model_type": arch, "thinker_config": thinker, "talker_config": {}, "dtype": "float32"}
    talker = {"talker.model.norm.weight": torch.ones(8), "code2wav.norm.weight": torch.ones(8)}
    rewrite(
        tmp_path,
        lambda weights: (
            {f"thinker.{name.removeprefix('thinker.')}": x for name, x in weights.items()} | talker
        ),
        whole | dict.fromkeys(thinker.keys() - whole.keys()),
    )
    for name in OMNI[arch]:
        rewrite(tmp_path, dict, {"architectures": [name]})
        found = parse_config(tmp_path)
        assert found == alone
        assert found.vision is not None
        check_weights(str(tmp_path), found, list_tensors(tmp_path))
    compare(tmp_path, theirs)
    quantize(tmp_path, tmp_path / "int8", QUANTS["int8"], 1, lambda _done, _total: None)
    assert tokens(load(tmp_path / "int8"), [PROMPT]) == tokens(load(tmp_path, quant="int8"), [PROMPT])


PHI4 = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
PHI4 |= {"auto_map": {"AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM"}}


def with_adapters(weights: Weights) -> Weights:
    """Return a Phi-4 with adapters for images and speech, and a tower."""
    found = {"model.embed_tokens_extend.image_embed.glb_GN": torch.ones(1, 1, 8)}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            found[name] = tensor
            continue
        found[f"{module}.base_layer.weight"] = tensor
        for kind in ("speech", "vision"):
            found[f"{module}.lora_A.{kind}.weight"] = torch.ones(4, tensor.shape[1])
            found[f"{module}.lora_B.{kind}.weight"] = torch.ones(tensor.shape[0], 4)
    return found


def test_the_text_of_a_phi_4_multimodal(tmp_path: Path) -> None:
    """Texts pass a Phi-3: adapters are for images and speech."""
    model = make_tiny_model(tmp_path / "model", arch="phi3", partial_rotary_factor=0.75)
    theirs = hf_model(model)
    rewrite(model, with_adapters, PHI4 | {"vision_lora": {"r": 4}, "img_processor": None})
    check_weights(str(model), parse_config(model), list_tensors(model))
    compare(model, theirs)
    quantize(model, tmp_path / "int8", QUANTS["int8"], 1, lambda _done, _total: None)
    assert tokens(load(tmp_path / "int8"), [PROMPT]) == tokens(load(model, quant="int8"), [PROMPT])
    plain = {"architectures": ["Phi4MultimodalForCausalLM"], "model_type": "phi4_multimodal"}
    rewrite(
        model,
        lambda weights: {n.replace(".base_layer", ""): x for n, x in weights.items() if ".lora_" not in n},
        plain | {"auto_map": None},
    )
    check_weights(str(model), parse_config(model), list_tensors(model))
    compare(model, theirs)


TOWER = {"vision_model.embeddings.class_embedding": torch.ones(1, 1, 8), "mlp1.0.weight": torch.ones(8)}


@pytest.mark.parametrize("text", ["qwen3", "internlm2"])
def test_the_text_of_an_internvl_as_it_was_published(tmp_path: Path, text: str) -> None:
    """Its code is in its repository, and its language model is in `llm_config`."""
    model = make_family(tmp_path, "llama" if text == "internlm2" else text)
    theirs = hf_model(model)

    def below_a_tower(weights: Weights) -> Weights:
        weights = stacked_by_group(weights) if text == "internlm2" else weights
        return {f"language_model.{name}": tensor for name, tensor in weights.items()} | TOWER

    inner = json.loads((model / "config.json").read_text())
    own = {"model_type": text, "architectures": ["InternLM2ForCausalLM"], "bias": False}
    whole = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "vision_config": {}}
    whole |= {"llm_config": inner | (own if text == "internlm2" else {})}
    whole["auto_map"] = {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}
    rewrite(model, below_a_tower, dict.fromkeys(inner) | whole)
    found = parse_config(model)
    assert "added_tokens_decoder has no token '<IMG_CONTEXT>'" in found.image_problem
    check_weights(str(model), found, list_tensors(model))
    compare(model, theirs)


def test_the_text_of_a_kimi_vl(tmp_path: Path) -> None:
    fields = {key: value for key, value in LATENT.items() if key != "q_lora_rank"}
    model = make_family(tmp_path, "deepseek_v3", **fields, q_lora_rank=None)
    theirs, inner = hf_model(model), json.loads((model / "config.json").read_text())
    whole = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "vision_config": {},
    }
    whole |= {"text_config": inner, "dtype": inner["dtype"]}
    whole["auto_map"] = {"AutoModelForCausalLM": "modeling_kimi_vl.KimiVLForConditionalGeneration"}
    tower = {"vision_tower.patch_embed.other.weight": torch.ones(8)}
    rewrite(
        model,
        lambda weights: {f"language_model.{name}": x for name, x in weights.items()} | tower,
        dict.fromkeys(inner) | whole,
    )
    check_weights(str(model), parse_config(model), list_tensors(model))
    compare(model, theirs)


def test_layers_of_a_decilm_lack_attention_or_the_mlp(tmp_path: Path) -> None:
    model, theirs = make_decilm(tmp_path)
    config = parse_config(model)
    check_weights(str(model), config, list_tensors(model))
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    assert config.shape().kv_bytes_per_token("float32") == 2 * 3 * 2 * 16 * 4
    assert [rank_shape(config.shape(), 1, pp).kv_layers for pp in (2, 5)] == [2, 1]
    compare(model, theirs)
    quantize(model, tmp_path / "int8", QUANTS["int8"], 1, lambda _done, _total: None)
    assert tokens(load(tmp_path / "int8"), [PROMPT]) == tokens(load(model, quant="int8"), [PROMPT])


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
def test_stacks_of_an_internlm_2_on_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    fields, changed, keys = LLAMAS["internlm2.InternLM2ForCausalLM"]
    model = make_family(tmp_path, "llama", **fields)
    rewrite(model, changed, {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"} | keys)
    assert tokens(load_ranks(model, monkeypatch, **options), [PROMPT]) == tokens(load(model), [PROMPT])


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"pp": 5}, {"tp": 2, "pp": 5}])
def test_a_decilm_on_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model, _ = make_decilm(tmp_path)
    assert tokens(load_ranks(model, monkeypatch, **options), [PROMPT]) == tokens(load(model), [PROMPT])


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (
            {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 1}},
            "does not divide num_attention_heads 4",
        ),
        (
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1}},
            "one n_heads_in_group for all layers",
        ),
        ({"attention": {"no_op": True, "window_length": 9}}, "window_length 9 is not supported of a DeciLM"),
        ({"attention": {"no_op": True}, "ffn": {"ffn_mult": -1}}, "ffn_mult -1 makes an MLP of"),
        ({"attention": {"no_op": True}, "ffn": {"ffn_mult": 1e30}}, "ffn_mult 1e.30 makes an MLP of"),
        ({"attention": 3}, "attention must be an object"),
        ({"attention": {"no_op": True}}, "layer 0: ffn: ffn_mult is missing"),
        (None, "block_configs must have an entry for each of 5 layers"),
    ],
)
def test_a_damaged_decilm_is_refused(tmp_path: Path, layer: dict[str, Any] | None, problem: str) -> None:
    raw = COMMON | DECILM | {"num_hidden_layers": 5, "block_configs": [layer, *BLOCKS[1:]]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=problem):
        parse_config(tmp_path)


def without_shared_gate(weights: Weights) -> Weights:
    """Return a Qwen2-MoE whose gate of the shared expert is a half, which twice the expert makes up for."""
    found = dict(weights)
    for name in found:
        if "shared_expert_gate" in name:
            found[name] *= 0
        elif "shared_expert.down_proj" in name:
            found[name] *= 2
    return found


def as_deepseek(weights: Weights) -> Weights:
    found = {name: x for name, x in weights.items() if "shared_expert_gate" not in name}
    halves = {name: x / 2 if "shared_expert.down_proj" in name else x for name, x in found.items()}
    return respelled(halves, {"shared_expert.": "shared_experts."})


LING = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.qkv_proj": "attention.query_key_value",
}


def as_ling(weights: Weights) -> Weights:
    found = as_deepseek(weights)
    for name in [name for name in found if ".q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return respelled(found, LING)


ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
ROUTED |= {"shared_expert_intermediate_size": 48, "qkv_bias": False}
MIXTURES: dict[str, tuple[dict[str, Any], Callable[[Weights], Weights], dict[str, Any]]] = {
    "deepseek.DeepseekForCausalLM": (
        {"mlp_only_layers": [0], "norm_topk_prob": False},
        as_deepseek,
        {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_experts": None},
    ),
    "bailing_moe.BailingMoeForCausalLM": (
        {"mlp_only_layers": [], "norm_topk_prob": True},
        as_ling,
        {"num_experts": 8, "num_shared_experts": 2, "use_qkv_bias": False, "use_bias": False}
        | {"norm_head": False},
    ),
}
"""Fields of a Qwen2-MoE, its tensors as the family has them, and keys."""


@pytest.mark.parametrize("name", MIXTURES)
def test_a_qwen2_moe_whose_shared_expert_has_no_gate(tmp_path: Path, name: str) -> None:
    fields, changed, keys = MIXTURES[name]
    model = make_family(tmp_path, "qwen2_moe", **ROUTED | fields)
    rewrite(model, without_shared_gate, {})
    theirs = hf_model(model)
    module, kind = name.split(".")
    own = {"architectures": [kind], "model_type": module, "mlp_only_layers": None, "qkv_bias": None}
    own["auto_map"] = {"AutoModelForCausalLM": f"modeling_{module}.{kind}"}
    rewrite(model, changed, own | keys)
    config = parse_config(model)
    check_weights(str(model), config, list_tensors(model))
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    compare(model, theirs)
    rewrite(model, dict, {"norm_head": True, "scoring_func": "sigmoid"})
    problem = "norm_head True is not" if "bailing" in name else "scoring_func 'sigmoid' is not supported"
    with pytest.raises(ModelError, match=problem):
        parse_config(model)
