"""Whole vision-language models: greedy tokens of transformers for prompts with pictures."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model_config.vision.config import VisionConfig
from llmbox.engine.model_config.vision.families import find_vision
from llmbox.engine.model_config.vision.layout import lay_out_image
from support.real_engines import ask, load, tokens
from support.tiny_models import write_json
from support.vision_models import (
    INDICATORS,
    MODELS,
    START,
    TEXT,
    draw_picture,
    indicators_of,
    make_vision_model,
    prepare,
    read_vision,
    reference_inputs,
)

IMAGE = 10
SIZES = [(50, 40), (131, 70)]
MANY = 12
WITHOUT_TOKEN_TYPES = {
    *("mistral3", "llava", "idefics3", "lfm2_vl", "internvl", "llama4"),
    *("lighton_ocr", "minicpmv4_6", "exaone4_5", "llava_next", "llava_onevision"),
    *("qianfan_ocr", "aya_vision", "cohere2_vision", "kimi_k25", "video_llama_3", "vipllava"),
    *(
        "qwen2_5_omni_thinker",
        "qwen3_omni_moe_thinker",
        "llava_next_video",
        "minicpm_ocr",
        "ovis2",
        "nemotron_h_omni",
    ),
}
"""Models whose `forward` takes no types of tokens."""


def prompt_with(directory: Path) -> tuple[AddRequest, list[Any]]:
    """Return a request with texts around two pictures, and the pictures."""
    vision = read_vision(directory)
    assert vision is not None
    ids, images, pictures = [3, 200, 17, 5], [], [draw_picture(*size) for size in SIZES]
    for number, picture in enumerate(pictures):
        layout, image = prepare(vision, picture)
        pieces = layout.text.split(vision.image_text)
        text = [[100 + 7 * number + sum(map(ord, piece)) % 90] if piece else [] for piece in pieces]
        own = [START, *text[0], *(token for piece in text[1:] for token in (IMAGE, *piece))]
        first, last = own.index(IMAGE), len(own) - own[::-1].index(IMAGE)
        place = {"start": len(ids) + first, "num_tokens": last - first, "num_rows": layout.num_rows}
        images.append(replace(image, content_hash=sha256(image.pixels).digest(), **place))
        ids += [*own, *range(40, 47)]
    request = ask("a", ids, MANY)
    return replace(request, images=images), pictures


@torch.inference_mode()
def tokens_of_transformers(model: Any, ids: list[int], inputs: dict[str, Any]) -> list[int]:
    """Greedy, the whole prompt for each token."""
    ids = list(ids)
    start = len(ids)
    for _ in range(MANY):
        all_ids = torch.tensor([ids])
        kinds = (all_ids == IMAGE).int()
        extra = {"token_type_ids" if "gemma3" in model.config.model_type else "mm_token_type_ids": kinds}
        if model.config.model_type in WITHOUT_TOKEN_TYPES:
            extra = {}
        if model.config.model_type.endswith("thinker"):  # positions by time, height and width need a mask
            extra, model.rope_deltas = {"attention_mask": torch.ones_like(all_ids)}, None
        if model.config.model_type == "gemma4_unified":
            extra = {"attention_mask": masks_of_generate(model, all_ids, kinds)}
        if hasattr(model.base_model, "rope_deltas"):
            model.base_model.rope_deltas = None
        logits = model(input_ids=all_ids, use_cache=False, **inputs, **extra).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[start:]


def masks_of_generate(model: Any, ids: torch.Tensor, kinds: torch.Tensor) -> Any:
    """Return the masks of `generate`: only layers with a window see all of a picture, as in other models of
    Gemma 4. Without them `forward` makes others.
    """
    states = model.get_input_embeddings()(ids)
    places = torch.arange(ids.shape[1]).unsqueeze(0)
    return model.create_masks_for_generate(
        model.config, states, None, past_key_values=None, position_ids=places, mm_token_type_ids=kinds
    )


GRANITE = {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.4}
VARIANTS: dict[str, dict[str, Any]] = {
    # in sliding windows alone
    "gemma4 in both directions": {
        "text_config": MODELS["gemma4"][1]["text_config"] | {"use_bidirectional_attention": "vision"}
    },
    "llava_next as Granite Vision": {
        "text_config": TEXT | GRANITE | {"attention_multiplier": 0.2, "logits_scaling": 2.0},
        "vision_config": MODELS["llava_onevision"][1]["vision_config"],
        "vision_feature_layer": [-3, -2, -1],
        "vision_feature_select_strategy": "full",
    },
}
"""Changes of a model's config."""


def with_indicators(vision: VisionConfig, request: AddRequest) -> list[int]:
    """Return the prompt of an Ovis2 with the tokens that transformers wants around tiles."""
    ids = list(request.prompt_ids)
    for image, size in zip(request.images, SIZES, strict=True):
        layout = lay_out_image(vision, *size)
        for place, row in enumerate(indicators_of(layout.tile_grid, 9)):
            ids[image.start + place] = IMAGE if row < 0 else INDICATORS[row]
    return ids


@pytest.mark.parametrize("kind", [*MODELS, *VARIANTS])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = make_vision_model(tmp_path, kind.partition(" ")[0], **VARIANTS.get(kind, {}))
    request, pictures = prompt_with(tmp_path)
    vision = read_vision(tmp_path)
    assert vision is not None
    ids = with_indicators(vision, request) if kind == "ovis2" else request.prompt_ids
    exact = tokens_of_transformers(model, ids, reference_inputs(tmp_path, vision, pictures))
    assert len(set(exact)) > 2
    for options in ({}, {"token_budget": 16, "max_running": 4}):
        assert tokens(load(tmp_path, **options), [request])["a"] == exact


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_an_omni_with_its_parts_for_speech_is_its_thinker(tmp_path: Path, kind: str) -> None:
    make_vision_model(tmp_path, f"{kind}_thinker")
    request, _ = prompt_with(tmp_path)
    exact = tokens(load(tmp_path), [request])
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    weights = {f"thinker.{name}": each for name, each in load_file(file).items()}
    save_file(weights | {"talker.codec_head.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    name = config.pop("architectures")[0].replace("Thinker", "")
    write_json(
        tmp_path / "config.json", {"architectures": [name], "model_type": kind, "thinker_config": config}
    )
    again, _ = prompt_with(tmp_path)
    assert again == request
    assert tokens(load(tmp_path), [again]) == exact


OWN_NAMES = {
    "multi_modal_projector.layer_norm.": "mlp1.0.",
    "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
    "vision_tower.": "vision_model.",
    ".cls_token": ".class_embedding",
    ".patch_embeddings.projection.": ".patch_embedding.",
    ".position_embeddings": ".position_embedding",
    ".encoder.layer.": ".encoder.layers.",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
    ".lambda_1": ".ls1",
    ".lambda_2": ".ls2",
    ".attention.projection_layer.": ".attn.proj.",
    ".attention.": ".attn.",
}
"""Parts of names in transformers' checkpoints of InternVL, and in those of its authors."""
OWN_KEYS = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}


def publish_internvl(directory: Path) -> None:
    """Rewrite a checkpoint of transformers as InternVL's authors publish theirs."""
    file = directory / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith((".q_proj.weight", ".q_proj.bias"))]:
        if name.startswith("vision_tower."):
            parts = [stored.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            stored[name.replace("q_proj", "qkv")] = torch.cat(parts)
    weights = {}
    for name, tensor in stored.items():
        for usual, own in OWN_NAMES.items():
            name = name.replace(usual, own)  # noqa: PLW2901
        weights[name] = tensor.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    tower = {OWN_KEYS.get(key, key): value for key, value in raw["vision_config"].items()}
    (size,) = set(tower["image_size"])
    tower |= {"image_size": size, "patch_size": tower["patch_size"][0], "model_type": "intern_vit_6b"}
    own: dict[str, Any] = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}
    own |= {
        "llm_config": raw["text_config"] | {"architectures": ["Qwen3ForCausalLM"]},
        "vision_config": tower,
    }
    own |= {"dynamic_image_size": True, "max_dynamic_patch": 6, "force_image_size": size, "select_layer": -1}
    own |= {"ps_version": "v2", "use_thumbnail": True, "downsample_ratio": 0.5, "torch_dtype": "float32"}
    own["auto_map"] = {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}
    write_json(directory / "config.json", own)
    tokens = {str(IMAGE): {"content": "<IMG_CONTEXT>", "special": True}}
    write_json(directory / "tokenizer_config.json", {"added_tokens_decoder": tokens})


@pytest.mark.parametrize("tower", [{}, {"use_qk_norm": True, "norm_type": "rms_norm"}], ids=["300M", "6B"])
def test_an_internvl_of_its_authors_is_that_of_transformers(tmp_path: Path, tower: dict[str, Any]) -> None:
    values = MODELS["internvl"][1]["vision_config"] | tower
    make_vision_model(tmp_path, "internvl", vision_config=values)
    rules = tmp_path / "preprocessor_config.json"
    mean = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    write_json(rules, json.loads(rules.read_text()) | mean)
    request, _ = prompt_with(tmp_path)
    exact = tokens(load(tmp_path), [request])
    assert len(set(exact["a"])) > 2
    publish_internvl(tmp_path)
    rules.unlink()
    own, _ = prompt_with(tmp_path)
    assert own == request
    assert tokens(load(tmp_path), [own]) == exact
    vision = read_vision(tmp_path)
    assert vision is not None
    assert vision.placeholder == "<image>"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ps_version": "v1"}, "ps_version 'v1' is not supported, only 'v2'"),
        ({"use_thumbnail": False}, "use_thumbnail False is not supported, only True"),
        ({"max_dynamic_patch": 100}, "max_dynamic_patch 100 is beyond anything known (64)"),
        ({"min_dynamic_patch": 7}, "min_dynamic_patch 7 is beyond anything known (6)"),
        ({"select_layer": 9}, "vision_feature_layer 9 is not supported, only some of 2 layers"),
    ],
)
def test_images_of_other_internvls_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    make_vision_model(tmp_path, "internvl")
    publish_internvl(tmp_path)
    file = tmp_path / "config.json"
    write_json(file, json.loads(file.read_text()) | changes)
    assert problem in find_vision(tmp_path)[1]
