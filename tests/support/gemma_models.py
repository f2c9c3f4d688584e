"""What `tiny_models` needs to know of Gemma: fields of config.json, tensors of a layer, and one that sees."""

from pathlib import Path
from typing import Any

GEMMA = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
SHRUNK = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


def gemma_fields(arch: str) -> dict[str, Any]:
    """Beside those that all decoders have. Windows are shorter than the prompts of the tests."""
    fields: dict[str, Any] = {
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    if arch == "gemma":
        return fields
    fields |= {"query_pre_attn_scalar": 24, "sliding_window": 17}
    if arch == "gemma2":
        return fields | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0}
    return fields | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3}


def gemma_norms(arch: str) -> list[str]:
    """Of a layer, beside the two that all decoders have."""
    if arch not in {"gemma2", "gemma3_text"}:
        return []
    return ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]


def make_gemma_that_sees(directory: Path) -> Path:
    """As transformers writes one, with random weights: a Gemma 3 with its vision tower."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = SHRUNK | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 17,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 256,
        "query_pre_attn_scalar": 24,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    ids = {"image_token_index": 319, "boi_token_index": 317, "eoi_token_index": 318}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.1 if name.endswith("norm.weight") else 0.2)
    model.save_pretrained(directory)
    return directory
