"""Tiny random vision-language models, and pictures."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from llmbox.app.sandbox.image_worker import make_tiles
from llmbox.engine.ipc.messages import PreparedImage
from llmbox.engine.model_config.vision.config import ImageLayout, VisionConfig
from llmbox.engine.model_config.vision.families import find_vision
from llmbox.engine.model_config.vision.layout import lay_out_image
from support.families import FAMILIES
from support.tiny_models import write_json, write_tokenizer

START = 9
"""Token id before each image."""
INDICATORS = [300, 301, 302, 303, 304]
"""Token ids of the rows around tiles in Ovis2: start, after the whole, between columns, between rows, end."""
TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PIXTRAL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 6,
    "image_size": 96,
}
SIGLIP = PIXTRAL | {"patch_size": 8, "image_size": 48, "num_patches": 36}
INTERN_VIT = PIXTRAL | {"patch_size": [8, 8], "image_size": [48, 48]}
QWEN: dict[str, Any] = {
    "hidden_size": 48,
    "out_hidden_size": 64,
    "intermediate_size": 80,
    "depth": 3,
    "num_heads": 4,
    "patch_size": 6,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
HALF_MROPE = MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": PIXTRAL | {"model_type": "pixtral"},
            "image_token_index": 10,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 96}, "patch_size": 12},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": PIXTRAL | {"model_type": "pixtral"},
            "image_token_index": 10,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 96}, "patch_size": 6},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SIGLIP,
            "image_token_id": 10,
            "scale_factor": 2,
        },
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 144},
            "max_image_size": {"longest_edge": 48},
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": TEXT | {"num_hidden_layers": 7, "sliding_window": 24},
            "tie_word_embeddings": False,
            "vision_config": SIGLIP | {"vision_use_head": False},
            "image_token_index": 10,
            "boi_token_index": 8,
            "eoi_token_index": 9,
            "mm_tokens_per_image": 9,
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 48, "width": 48}},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
            "vision_config": QWEN | {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 6,
            "size": {"shortest_edge": 500, "longest_edge": 12000},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": TEXT | {"rope_parameters": MROPE},
            "vision_config": QWEN | {"window_size": 36, "fullatt_block_indexes": [1]},
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 6,
            "min_pixels": 500,
            "max_pixels": 12000,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": TEXT | {"rope_parameters": MROPE},
            "vision_config": {
                "embed_dim": 48,
                "hidden_size": 64,
                "depth": 2,
                "num_heads": 4,
                "patch_size": 6,
            },
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 6,
            "min_pixels": 500,
            "max_pixels": 12000,
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": TEXT | DELTA | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
            "vision_config": QWEN | {"num_position_embeddings": 49},
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 6,
            "size": {"shortest_edge": 500, "longest_edge": 12000},
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": TEXT
            | {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 32,
                "sliding_window": 24,
                "hidden_size_per_layer_input": 0,
            },
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "head_dim": 16,
                "patch_size": 4,
                "position_embedding_size": 900,
                "use_clipped_linears": True,
                "standardize": True,
            },
            "audio_config": None,
            "tie_word_embeddings": False,
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": TEXT
            | {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 32,
                "sliding_window": 24,
            },
            "vision_config": {
                "patch_size": 4,
                "mm_embed_dim": 48,
                "output_proj_dims": 48,
                "mm_posemb_size": 300,
            },
            "audio_config": None,
            "tie_word_embeddings": False,
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Gemma4UnifiedImageProcessor",
            "patch_size": 4,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": TEXT
            | {
                "model_type": "lfm2",
                "tie_word_embeddings": True,
                "layer_types": ["conv", "full_attention", "conv"],
            },
            "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "vision_use_head": False},
            "image_token_id": 10,
            "projector_hidden_size": 40,
        },
        {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 8,
            "tile_size": 64,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "max_tiles": 4,
        },
    ),
    "lfm3_vl": (
        "Lfm3VlForConditionalGeneration",
        {
            "text_config": TEXT
            | {
                "model_type": "lfm3",
                "tie_word_embeddings": True,
                "layer_types": ["conv", "full_attention", "sliding_attention"],
                "sliding_window": 19,
            },
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 80,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "patch_size": 6,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            },
            "image_token_id": 10,
            "projector_hidden_size": 40,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 6,
            "size": {"shortest_edge": 500, "longest_edge": 12000},
        },
    ),
    "glm_ocr": (
        "GlmOcrForConditionalGeneration",
        {
            "text_config": TEXT | {"rope_parameters": MROPE},
            "vision_config": QWEN,
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Glm46VImageProcessor",
            "patch_size": 6,
            "size": {"shortest_edge": 500, "longest_edge": 12000},
        },
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {
            "text_config": TEXT | {"rope_parameters": HALF_MROPE},
            "vision_config": QWEN | {"image_size": 42, "attention_bias": True},
            "image_token_id": 10,
        },
        {
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 6,
            "size": {"shortest_edge": 500, "longest_edge": 12000},
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "qwen3"},
            "vision_config": INTERN_VIT | {"attention_bias": True},
            "image_token_id": 10,
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 48, "width": 48},
            "max_patches": 6,
        },
    ),
}
MODELS["llama4"] = (
    "Llama4ForConditionalGeneration",
    {
        "text_config": TEXT
        | {"intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 2, "moe_layers": []},
        "vision_config": PIXTRAL
        | {"patch_size": 8, "image_size": 48, "intermediate_size": 192, "vision_output_dim": 40}
        | {"projector_input_dim": 40, "projector_output_dim": 40},
        "image_token_id": 10,
    },
    {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 48, "width": 48}, "max_patches": 6},
)
MODELS["exaone4_5"] = (
    "Exaone4_5_ForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "exaone4", "sliding_window": 24},
        "vision_config": QWEN | {"window_size": 36, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
        "image_token_id": 10,
    },
    MODELS["qwen2_5_vl"][2],
)
MODELS["hyperclovax_vision_v2"] = (
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "hyperclovax", "attention_multiplier": 0.25},
        "vision_config": QWEN
        | {"model_type": "qwen2_5_vl_vision", "window_size": 36, "fullatt_block_indexes": [1]}
        | {"out_hidden_size": 40},
        "tie_word_embeddings": False,
        "image_token_id": 10,
    },
    MODELS["qwen2_5_vl"][2],
)
MODELS["lighton_ocr"] = (
    "LightOnOcrForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "qwen3"},
        "vision_config": PIXTRAL | {"model_type": "pixtral"},
        "tie_word_embeddings": False,
        "image_token_id": 10,
    },
    MODELS["mistral3"][2],
)
MODELS["minicpmv4_6"] = (
    "MiniCPMV4_6ForConditionalGeneration",
    {
        "text_config": TEXT | DELTA | {"model_type": "qwen3_5_text", "rope_parameters": MROPE},
        "vision_config": SIGLIP | {"num_hidden_layers": 3},
        "insert_layer_id": 1,
        "image_token_id": 10,
    },
    {"image_processor_type": "MiniCPMV4_6ImageProcessor", "patch_size": 8, "scale_resolution": 64},
)
MODELS["minicpm_ocr"] = (
    "MiniCPMOcrForConditionalGeneration",
    MODELS["minicpmv4_6"][1] | {"tie_word_embeddings": True},
    MODELS["minicpmv4_6"][2] | {"downsample_mode": "4x"},
)
MODELS["ovis2"] = (
    "Ovis2ForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": PIXTRAL
        | {"patch_size": 8, "image_size": 48, "hidden_stride": 2, "vocab_size": 40}
        | {"num_visual_indicator_tokens": 5},
        "hidden_size": 64,
        "vocab_size": 320,
        "image_token_id": 10,
        "visual_indicator_token_ids": INDICATORS,
        "tie_word_embeddings": False,
    },
    {
        "image_processor_type": "Ovis2ImageProcessor",
        "size": {"height": 48, "width": 48},
        "crop_to_patches": True,
        "max_patches": 6,
    },
)
MODELS["llava_clip"] = (
    "LlavaForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
        "image_token_index": 10,
    },
    {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 48},
        "crop_size": {"height": 48, "width": 48},
    },
)
PINPOINTS = [[48 * rows, 48 * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
MODELS["llava_next"] = (
    "LlavaNextForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
        "image_token_index": 10,
        "image_grid_pinpoints": PINPOINTS,
    },
    {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 48},
        "crop_size": {"height": 48, "width": 48},
        "image_grid_pinpoints": PINPOINTS,
    },
)
MODELS["llava_onevision"] = (
    "LlavaOnevisionForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "qwen2", "num_hidden_layers": 2},
        "vision_config": SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": 10,
        "vision_aspect_ratio": "anyres_max_2",
        "image_grid_pinpoints": PINPOINTS,
    },
    {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 48, "width": 48},
        "image_grid_pinpoints": PINPOINTS,
    },
)
MODELS["paddleocr_vl"] = (
    "PaddleOCRVLForConditionalGeneration",
    {
        "text_config": TEXT | {"rope_parameters": MROPE, "tie_word_embeddings": True},
        "vision_config": SIGLIP | {"hidden_size": 64},
        "image_token_id": 10,
    },
    {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "patch_size": 8,
        "size": {"shortest_edge": 500, "longest_edge": 12000},
    },
)
MODELS["qianfan_ocr"] = (
    "QianfanOCRForConditionalGeneration",
    MODELS["internvl"][1] | {"vision_config": INTERN_VIT},
    MODELS["internvl"][2],
)
SIGLIP_ALONE = SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
COHERE2 = TEXT | {"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 24}
MODELS["aya_vision"] = (
    "AyaVisionForConditionalGeneration",
    {"text_config": COHERE2, "vision_config": SIGLIP_ALONE, "image_token_index": 10},
    MODELS["internvl"][2],
)
MODELS["cohere2_vision"] = (
    "Cohere2VisionForConditionalGeneration",
    {
        "text_config": COHERE2,
        "vision_config": SIGLIP_ALONE,
        "alignment_intermediate_size": 40,
        "image_token_id": 10,
    },
    {
        "image_processor_type": "Cohere2VisionImageProcessor",
        "size": {"height": 48, "width": 48},
        "max_patches": 6,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
)
MODELS["cohere_compass"] = (
    "CohereCompassForConditionalGeneration",
    {
        **MODELS["qwen3_vl"][1],
        "text_config": TEXT
        | {"sliding_window": 24, "logit_scale": 0.5}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"sliding_attention": MROPE, "full_attention": None}},
    },
    MODELS["qwen3_vl"][2],
)
MODELS["kimi_k25"] = (
    "Kimi_K25ForConditionalGeneration",
    {
        "text_config": TEXT
        | {"model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
        | {"qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "first_k_dense_replace": 9}
        | {"num_key_value_heads": 4},
        "vision_config": PIXTRAL | {"pos_emb_height": 5, "pos_emb_width": 5},
        "projection_hidden_size": 48,
        "tie_word_embeddings": False,
        "image_token_id": 10,
    },
    {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 6, "max_patches": 300}
    | {"size": {"max_height": 16, "max_width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
)
MODELS["kimi_vl"] = (
    MODELS["kimi_k25"][0],
    MODELS["kimi_k25"][1],
    {"patch_size": 6, "in_token_limit": 300, "merge_kernel_size": [2, 2]}
    | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
)
"""A Kimi K2.5 under the names of Kimi-VL, which transformers does not have."""
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS["glm4v_moe"] = (
    "Glm4vMoeForConditionalGeneration",
    MODELS["glm4v"][1] | {"text_config": TEXT | _EXPERTS | {"rope_parameters": HALF_MROPE}},
    MODELS["glm4v"][2],
)
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
OMNI = {"vision_start_token_id": START, "image_token_id": 10, "tie_word_embeddings": False}
MODELS["qwen2_5_omni_thinker"] = (
    "Qwen2_5OmniThinkerForConditionalGeneration",
    {**MODELS["qwen2_5_vl"][1], **OMNI, "audio_config": AUDIO | {"output_dim": 64}},
    MODELS["qwen2_5_vl"][2],
)
MODELS["qwen3_omni_moe_thinker"] = (
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    {
        **MODELS["qwen3_vl"][1],
        **OMNI,
        "audio_config": AUDIO | {"output_dim": 64, "downsample_hidden_size": 16},
    }
    | {
        "text_config": TEXT
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"rope_parameters": MROPE | {"mrope_interleaved": True}}
    },
    MODELS["qwen3_vl"][2],
)
MODELS["video_llama_3"] = (
    "VideoLlama3ForConditionalGeneration",
    {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": PIXTRAL,
        "image_token_id": 10,
        "tie_word_embeddings": False,
    },
    {
        "image_processor_type": "VideoLlama3ImageProcessor",
        "patch_size": 6,
        "size": {"shortest_edge": 500, "longest_edge": 4000},
    },
)
MODELS["vipllava"] = (
    "VipLlavaForConditionalGeneration",
    MODELS["llava_clip"][1] | {"vision_feature_layer": [-2, -1, 0]},
    MODELS["llava_clip"][2],
)
MODELS["llava_next_video"] = ("LlavaNextVideoForConditionalGeneration", *MODELS["llava_next"][1:])
MODELS["nemotron_h_omni"] = (
    "NemotronH_Omni_Reasoning_V3",
    {
        "text_config": TEXT | FAMILIES["nemotron_h"] | {"model_type": "nemotron_h"},
        "vision_config": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"mlp_ratio": 1.5, "patch_size": 8, "max_img_size": 64, "num_cls_tokens": 2, "num_registers": 3}
        | {"video_temporal_patch_size": 2},
        "vision_hidden_size": 48,
        "projector_hidden_size": 40,
        "image_token_id": 10,
    },
    {"patch_size": 8, "min_num_patches": 16, "max_num_patches": 90},
)
"""Class in transformers, values of its config, and preprocessor_config.json."""


WRITTEN_NAMES = {
    "qianfan_ocr": {"l.model.encoder.": "l.model."},
    "kimi_k25": {"l.blocks.": "l.layers.", "r.encoder.patch_embed": "r.patch_embed"},
}
WRITTEN_NAMES["kimi_vl"] = WRITTEN_NAMES["kimi_k25"] | {
    "mm_projector.": "multi_modal_projector.",
    ".proj.0.": ".linear_1.",
    ".proj.2.": ".linear_2.",
}
"""Parts of names that transformers does not write as they are published, as it takes one part of a model for
another."""


def write_published_names(directory: Path, kind: str) -> None:
    file = directory / "model.safetensors"
    for wrong, published in WRITTEN_NAMES.get(kind, {}).items():
        weights = {name.replace(wrong, published): each for name, each in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    if kind == "kimi_vl":
        config = json.loads((directory / "config.json").read_text()) | {"model_type": kind}
        config |= {"architectures": ["KimiVLForConditionalGeneration"]}
        config["media_placeholder_token_id"] = config.pop("image_token_id")
        write_json(directory / "config.json", config)


def make_vision_model(directory: Path, kind: str, **changes: Any) -> Any:
    """Write a checkpoint and return the model of transformers in float32."""
    import transformers

    name, values, processor = MODELS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(11)
    values = deepcopy(values | changes)  # configs of transformers change what they are given
    model = model_class(model_class.config_class(**values)).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 or "embed" in each else 1.5 * parameter[0].numel() ** -0.5
            scale = 1.0 if "embed_tokens" in each else scale
            base = 1.0 if parameter.dim() == 1 and "norm" in each and each.endswith("weight") else 0.0
            parameter.copy_(torch.randn_like(parameter) * scale + base)
        for each, buffer in model.named_buffers():
            if each.endswith(("input_max", "output_max", "std_scale")):
                buffer.fill_(1.3)
            elif each.endswith(("input_min", "output_min", "std_bias")):
                buffer.fill_(-1.3)
    model.save_pretrained(directory)
    write_published_names(directory, kind)
    write_json(directory / "preprocessor_config.json", processor)
    return model


def draw_picture(width: int, height: int) -> Image.Image:
    """Draw colors that change with the place, and noise."""
    torch.manual_seed(width * 7919 + height)
    across, down = torch.linspace(0, 255, width), torch.linspace(0, 255, height).unsqueeze(1)
    colors = torch.stack([across + 0 * down, 0 * across + down, (across + down) / 2], dim=2)
    noisy = (0.7 * colors + 70 * torch.rand(height, width, 3)).clamp(0, 255).to(torch.uint8)
    return Image.frombytes("RGB", (width, height), bytes(noisy.flatten().tolist()))


def prepare(
    vision: VisionConfig, picture: Image.Image, *, low_detail: bool = False
) -> tuple[ImageLayout, PreparedImage]:
    """Lay out and resize a picture as the worker of the daemon does."""
    layout = lay_out_image(vision, *picture.size, low_detail=low_detail)
    tiles = make_tiles(picture, vision, layout)
    assert [(tile.height, tile.width) for tile in tiles] == list(layout.tiles)
    pixels = b"".join(tile.tobytes() for tile in tiles)
    return layout, PreparedImage(
        content_hash=b"",
        tiles=list(layout.tiles),
        pixels=pixels,
        grid=layout.grid,
        size=picture.size,
        num_tokens=layout.num_rows,
    )


def reference_inputs(directory: Path, vision: VisionConfig, pictures: list[Image.Image]) -> dict[str, Any]:
    """Return what transformers' processor gives the model. Those of LFM2-VL, Llama 4, Command A Vision,
    Kimi K2.5 and Gemma 4 12B need torchvision: their models get our tiles.
    """
    from transformers import AutoImageProcessor

    if vision.tower.projector == "gemma4_unified":
        return _unified_inputs(vision, pictures)
    if vision.tower.projector == "llama4":
        return {"pixel_values": torch.cat([_llama4_tiles(vision, picture) for picture in pictures])}
    if vision.processor.kind == "padded_units":
        return _patches_of_tiles(vision, pictures)
    if vision.processor.kind == "patch_grid":
        found = _patches_of_tiles(vision, pictures)
        return {
            "pixel_values": found["pixel_values"].flatten(1),
            "image_grid_hw": found["image_grid_thw"][:, 1:],
        }
    if vision.processor.kind == "fitted_canvas":
        return {"pixel_values": torch.cat([_our_tiles(vision, picture) for picture in pictures])}
    if vision.processor.kind != "lfm2":
        nested = [pictures] if vision.processor.kind == "tiles" else pictures
        options = {"crop_to_patches": True} if vision.processor.kind == "canvas" else {}
        inputs = AutoImageProcessor.from_pretrained(directory)(images=nested, return_tensors="pt", **options)
        counts = {"rows", "cols", "num_crops", "num_soft_tokens_per_image", "num_patches"}
        counts |= {"grids", "num_patches_per_image", "batch_num_images"}
        return {key: value for key, value in inputs.items() if key not in counts}
    side, tiles, shapes = vision.tower.patch_size, [], []
    for picture in pictures:
        layout, image = prepare(vision, picture)
        start = 0
        for height, width in layout.tiles:
            size = 3 * height * width
            pixels = torch.frombuffer(bytearray(image.pixels[start : start + size]), dtype=torch.uint8) / 255
            tile = ((pixels - 0.5) / 0.5).view(height // side, side, width // side, side, 3)
            tiles.append(tile.transpose(1, 2).reshape(-1, 3 * side * side))
            shapes.append([height // side, width // side])
            start += size
    longest = max(map(len, tiles))
    padded = [torch.nn.functional.pad(tile, (0, 0, 0, longest - len(tile))) for tile in tiles]
    return {
        "pixel_values": torch.stack(padded),
        "pixel_attention_mask": torch.stack([(torch.arange(longest) < len(tile)).int() for tile in tiles]),
        "spatial_shapes": torch.tensor(shapes),
    }


def _our_levels(vision: VisionConfig, picture: Image.Image) -> torch.Tensor:
    layout, image = prepare(vision, picture)
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(-1, *layout.tiles[0], 3)
    return pixels.permute(0, 3, 1, 2)


def _our_tiles(vision: VisionConfig, picture: Image.Image) -> torch.Tensor:
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (vision.processor.mean, vision.processor.std))
    return (_our_levels(vision, picture) / 255 - mean) / std


def _patches_of_tiles(vision: VisionConfig, pictures: list[Image.Image]) -> dict[str, Any]:
    side, values, grids = vision.tower.patch_size, [], []
    for picture in pictures:
        (tile,) = _our_tiles(vision, picture)
        rows, columns = (size // side for size in tile.shape[1:])
        patches = tile.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4)
        values.append(patches.reshape(-1, 3, side, side))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}


def _llama4_tiles(vision: VisionConfig, picture: Image.Image) -> torch.Tensor:
    return ((_our_levels(vision, picture).bfloat16() * (1 / 255) - 0.5) / 0.5).float()


def _unified_inputs(vision: VisionConfig, pictures: list[Image.Image]) -> dict[str, Any]:
    side, values, places = vision.tower.patch_size, [], []
    for picture in pictures:
        layout, image = prepare(vision, picture)
        ((height, width),) = layout.tiles
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8) / 255
        patches = pixels.view(height // side, side, width // side, side, 3).transpose(1, 2)
        values.append(patches.reshape(-1, 3 * side * side))
        rows, columns = torch.meshgrid(
            torch.arange(height // side), torch.arange(width // side), indexing="ij"
        )
        places.append(torch.stack([columns, rows], 2).view(-1, 2))
    longest = max(map(len, values))
    return {
        "pixel_values": torch.stack(
            [torch.nn.functional.pad(each, (0, 0, 0, longest - len(each))) for each in values]
        ),
        "image_position_ids": torch.stack(
            [torch.nn.functional.pad(each, (0, 0, 0, longest - len(each)), value=-1) for each in places]
        ),
    }


NUMBERS = ("<image_id>", "</image_id>")
SEPARATORS = ("<|tile_x_separator|>", "<|tile_y_separator|>")
SEEING_MARKS = {
    "qwen3_vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "glm4v": ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    "internvl": ("<img>", "<IMG_CONTEXT>", "</img>"),
    "llama4": ("<|image_start|>", "<|patch|>", "<|image_end|>", "<|image|>", *SEPARATORS),
    "llava_clip": ("", "<image>", ""),
    "llava_next": ("", "<image>", ""),
    "minicpmv4_6": ("", "<|image_pad|>", "", "<image>", "</image>", "<slice>", "</slice>", *NUMBERS),
}
"""Special tokens before, for and after the rows of a picture, and others."""
WRITTEN = {"internvl": "<IMG_CONTEXT>\\n", "llama4": "<|image|>", "minicpmv4_6": "<|image_pad|>"}
"""What published templates write for a picture, where it is not the first three of these."""
SEEING_TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_seeing_chat_model(directory: Path, kind: str = "qwen3_vl") -> Path:
    """Write a model with a tokenizer and a chat template that has places for pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = SEEING_MARKS[kind]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks if mark])
    tokenizer.save(str(directory / "tokenizer.json"))
    text = MODELS[kind][1]["text_config"] | {"vocab_size": tokenizer.get_vocab_size()}
    key = "image_token_index" if kind.startswith("llava") else "image_token_id"
    image = {key: tokenizer.token_to_id(marks[1])}
    make_vision_model(directory, kind, text_config=text, **image)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    template = SEEING_TEMPLATE.replace("".join(SEEING_MARKS["qwen3_vl"]), WRITTEN.get(kind, "".join(marks)))
    write_json(directory / "tokenizer_config.json", config | {"chat_template": template})
    return directory


def indicators_of(grid: tuple[int, int], of_tile: int) -> list[int]:
    """Return the row of Ovis2's indicators for each row of an image, -1 for those of patches."""
    (rows, columns), patches = grid, [-1] * of_tile
    lines = [[*patches, *([2, *patches] * (columns - 1))] for _ in range(rows)]
    tiles = [row for number, line in enumerate(lines) for row in ([3] if number else []) + line]
    return [0, *patches, 1, *(tiles if rows * columns > 1 else []), 4]


def read_vision(directory: Path) -> VisionConfig | None:
    """Return the vision part of a model folder; None where pictures are not read."""
    return find_vision(directory)[0]
