"""Whole vision-language models: greedy tokens of transformers for prompts with pictures."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.ipc.messages import AddRequest
from support.real_engines import ask, load, tokens
from support.vision_models import (
    MODELS,
    TEXT,
    draw_picture,
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
    *("qianfan_ocr", "aya_vision", "cohere2_vision", "kimi_k25"),
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
        own = [*text[0], *(token for piece in text[1:] for token in (IMAGE, *piece))]
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


@pytest.mark.parametrize("kind", [*MODELS, *VARIANTS])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = make_vision_model(tmp_path, kind.partition(" ")[0], **VARIANTS.get(kind, {}))
    request, pictures = prompt_with(tmp_path)
    vision = read_vision(tmp_path)
    assert vision is not None
    exact = tokens_of_transformers(model, request.prompt_ids, reference_inputs(tmp_path, vision, pictures))
    assert len(set(exact)) > 2
    for options in ({}, {"token_budget": 16, "max_running": 4}):
        assert tokens(load(tmp_path, **options), [request])["a"] == exact
