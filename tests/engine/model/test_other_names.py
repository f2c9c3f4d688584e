"""Models under other names than those of transformers, and with tensors that nothing needs, as published."""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.expected_tensors import check_weights
from support.families import COMMON, make_family
from support.real_engines import all_logits, ask, hf_model, hf_tokens, load, runner_of, tokens

PROMPT = ask("a", [3, 200, 17, 5, *range(40, 70), 9, 300], 8)
Weights = dict[str, Tensor]


def rewrite(model: Path, changed: Callable[[Weights], Weights], config: Mapping[str, Any]) -> None:
    """Change the tensors and keys of a model; a key with None is left out."""
    file = model / "model.safetensors"
    weights = {name: tensor.contiguous() for name, tensor in changed(load_file(file)).items()}
    save_file(weights, file, metadata={"format": "pt"})
    raw = json.loads((model / "config.json").read_text()) | config
    (model / "config.json").write_text(json.dumps({key: x for key, x in raw.items() if x is not None}))


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
@torch.inference_mode()
def test_a_llama_under_other_names(tmp_path: Path, name: str) -> None:
    """Code of these families is in their repositories: it computes what Llama does."""
    fields, changed, keys = LLAMAS[name]
    model = make_family(tmp_path, "llama", **fields)
    if name.endswith("-qkv"):  # a Llama has a bias there too
        rewrite(model, lambda ws: {n: 0 * x if n.endswith("o_proj.bias") else x for n, x in ws.items()}, {})
    theirs = hf_model(model)
    exact = theirs(torch.tensor([PROMPT.prompt_ids])).logits[0]
    expected = hf_tokens(theirs, PROMPT.prompt_ids, 8)
    module, kind = name.partition("-")[0].split(".")
    own = {"architectures": [kind], "model_type": module}
    own["auto_map"] = {"AutoModelForCausalLM": f"modeling_{module}.{kind}"}
    rewrite(model, changed, own | keys)
    config = parse_config(model)
    check_weights(str(model), config, list_tensors(model))
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    torch.testing.assert_close(
        all_logits(runner_of(load(model)), PROMPT.prompt_ids), exact, atol=1e-4, rtol=1e-4
    )
    assert tokens(load(model), [PROMPT])["a"] == expected


@torch.inference_mode()
def test_a_minicpm_is_a_granite_with_other_multipliers(tmp_path: Path) -> None:
    """MiniCPM divides by widths and depths where Granite has the numbers."""
    scales = {"embedding_multiplier": 6.0, "residual_multiplier": 1.4 / 2**0.5, "attention_multiplier": 0.25}
    model = make_family(tmp_path, "granite", **scales, logits_scaling=64 / 48, tie_word_embeddings=True)
    theirs = hf_model(model)
    exact = theirs(torch.tensor([PROMPT.prompt_ids])).logits[0]
    expected = hf_tokens(theirs, PROMPT.prompt_ids, 8)
    own = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
    own |= {"auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"}}
    own |= {"scale_emb": 6, "scale_depth": 1.4, "dim_model_base": 48}
    own |= dict.fromkeys((*scales, "logits_scaling", "tie_word_embeddings"))
    rewrite(model, dict, own)
    check_weights(str(model), parse_config(model), list_tensors(model))
    torch.testing.assert_close(
        all_logits(runner_of(load(model)), PROMPT.prompt_ids), exact, atol=1e-4, rtol=1e-4
    )
    assert tokens(load(model), [PROMPT])["a"] == expected
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
