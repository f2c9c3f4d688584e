"""Vision towers: embeddings of transformers, the same bits every time, and files that do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.vision.config import VisionConfig
from llmbox.engine.model_config.vision.families import find_vision
from llmbox.engine.model_config.vision.layout import lay_out_image
from llmbox.engine.vision import layers, tower
from llmbox.engine.vision.encoder import VisionEncoder, load_vision_encoder
from llmbox.kernels.cpu import attention
from llmbox.kernels.dispatch import select_ops
from llmbox.kernels.ops import Ops
from llmbox.kernels.reference import REFERENCE
from support.tiny_models import write_json
from support.vision_models import (
    MODELS,
    draw_picture,
    indicators_of,
    make_vision_model,
    prepare,
    read_vision,
    reference_inputs,
)

SIZES = [(50, 40), (13, 1), (30, 100), (131, 70)]
CPU = torch.device("cpu")


def load(directory: Path, ops: Ops = REFERENCE, dtype: torch.dtype = torch.float32) -> VisionEncoder:
    vision = read_vision(directory)
    assert vision is not None
    return load_vision_encoder(vision, directory, ops, dtype)


def encode(encoder: VisionEncoder, picture: Image.Image) -> torch.Tensor:
    steps = encoder.encode(prepare(encoder.vision, picture)[1])
    while True:
        try:
            next(steps)
        except StopIteration as end:
            rows: torch.Tensor = end.value
            return rows


@pytest.mark.parametrize("kind", MODELS)
def test_embeddings_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model, unused = make_vision_model(tmp_path, kind), 0
    if kind in {
        "llava_clip",
        "llava_next",
        "llava_next_video",
    }:  # which read the last layer but one, and no norm
        tower = model.model.vision_tower
        unused = sum(each.numel() for each in tower.encoder.layers[-1].parameters()) + 2 * 48
    if kind in {"llava_onevision", "aya_vision", "vipllava"}:
        unused = 2 * 48
    if kind == "nemotron_h_omni":  # patches of videos, and numbers of rows of the class embedding
        unused = 2 * 3 * 64 * 48 + 2
    if kind == "minicpm_ocr":
        unused = sum(each.numel() for each in model.model.vision_tower.vit_merger.parameters())
    compare(tmp_path, model, SIZES, unused)


def compare(directory: Path, model: Any, sizes: list[tuple[int, int]], unused: int = 0) -> None:
    """Compare embeddings. `unused`: parameters of the checkpoint's tower that are not read."""
    encoder = load(directory)
    assert (
        encoder.vision.num_params
        == sum(
            each.numel()
            for name, each in load_file(directory / "model.safetensors").items()
            if is_vision(name)
        )
        - unused
    )
    for size in sizes:
        picture = draw_picture(*size)
        found = encode(encoder, picture)
        inputs = reference_inputs(directory, encoder.vision, [picture])
        with torch.inference_mode():
            if model.config.model_type == "llama4":
                theirs = model.get_image_features(**inputs)
                rows = model.multi_modal_projector(theirs.last_hidden_state)
            else:
                part = (
                    model.model
                    if hasattr(model, "model") and "omni" not in model.config.model_type
                    else model
                )
                theirs = part.get_image_features(**inputs, return_dict=True)
                rows = theirs.pooler_output
        rows = rows.flatten(0, -2) if isinstance(rows, torch.Tensor) else torch.cat(list(rows))
        if model.config.model_type == "ovis2":
            rows = with_indicators(encoder.vision, size, rows, theirs.visual_indicator_features)
        levels = [torch.cat(list(level)) for level in getattr(theirs, "deepstack_features", None) or []]
        torch.testing.assert_close(found, torch.stack([rows, *levels]), rtol=1e-4, atol=1e-4)
        layout = prepare(encoder.vision, picture)[0]
        assert layout.text.count(encoder.vision.image_text) == layout.num_rows == len(rows)


def with_indicators(vision: VisionConfig, size: Any, rows: Any, indicators: Any) -> torch.Tensor:
    """Return the rows of an image of Ovis2 with those around its tiles."""
    layout, of_patches = lay_out_image(vision, *size), iter(rows)
    places = indicators_of(layout.tile_grid, len(rows) // len(layout.tiles))
    return torch.stack([next(of_patches) if place < 0 else indicators[place] for place in places])


def test_tiles_that_are_not_whole_patches_lose_their_edge(tmp_path: Path) -> None:
    tower = MODELS["idefics3"][1]["vision_config"] | {"image_size": 53}
    model = make_vision_model(tmp_path, "idefics3", vision_config=tower)
    rules = MODELS["idefics3"][2] | {"size": {"longest_edge": 106}, "max_image_size": {"longest_edge": 53}}
    write_json(tmp_path / "preprocessor_config.json", rules)
    encoder, picture = load(tmp_path), draw_picture(60, 40)
    with torch.inference_mode():
        inputs = reference_inputs(tmp_path, encoder.vision, [picture])
        rows = model.model.get_image_features(**inputs, return_dict=True).pooler_output[0]
    torch.testing.assert_close(encode(encoder, picture)[0], rows, rtol=1e-4, atol=1e-4)


def test_llava_with_siglip(tmp_path: Path) -> None:
    _, values, _ = MODELS["llava_clip"]
    vision = values["vision_config"] | {"model_type": "siglip_vision_model", "vision_use_head": False}
    full = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    model = make_vision_model(tmp_path, "llava_clip", vision_config=vision, **full)
    rules = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 48, "width": 48}}
    write_json(tmp_path / "preprocessor_config.json", rules)
    compare(tmp_path, model, SIZES[:2], unused=2 * 48)  # a norm


@pytest.mark.parametrize(
    ("tower", "side"),
    [
        ({"norm_type": "rms_norm", "use_qk_norm": True}, 48),  # InternViT 6B
        ({"attention_bias": True}, 66),  # positions of a larger tile, whose edge is no whole patch
    ],
)
def test_variants_of_intern_vit(tmp_path: Path, tower: dict[str, Any], side: int) -> None:
    _, values, rules = MODELS["internvl"]
    vision = values["vision_config"] | {"attention_bias": False} | tower
    model = make_vision_model(tmp_path, "internvl", vision_config=vision)
    write_json(tmp_path / "preprocessor_config.json", rules | {"size": {"height": side, "width": side}})
    compare(tmp_path, model, SIZES[:1])


def is_vision(name: str) -> bool:
    parts = ("vision_", "visual", "multi_modal_projector", "connector", "embed_vision", "merger")
    parts += ("image_newline", "mlp_AR", "mlp1.", "mm_projector", "model.projector.", "visual_e")
    return any(part in name for part in parts)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("idefics3", torch.float32, 1e-4),
        ("qwen2_5_vl", torch.bfloat16, 0.1),
        ("internvl", torch.bfloat16, 0.1),
        ("llama4", torch.float32, 1e-4),
        ("lfm3_vl", torch.bfloat16, 0.3),  # twice as many layers
        ("llava_onevision", torch.float32, 1e-4),
        ("aya_vision", torch.float32, 1e-4),
        ("kimi_k25", torch.bfloat16, 0.1),
        ("ovis2", torch.float32, 1e-4),
        ("nemotron_h_omni", torch.float32, 1e-4),
    ],
)
def test_a_picture_has_the_same_bits_every_time_on_the_cpp_kernels(
    tmp_path: Path, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    make_vision_model(tmp_path, kind)
    found = []
    for threads in (1, 2):
        encoder = load(tmp_path, select_ops(CPU, dtype, threads=threads), dtype)
        first = encode(encoder, draw_picture(131, 70))
        encode(encoder, draw_picture(50, 40))
        found += [first, encode(encoder, draw_picture(131, 70))]
    assert all(torch.equal(found[0], each) for each in found)
    plain = encode(load(tmp_path, REFERENCE, torch.float32), draw_picture(131, 70))
    torch.testing.assert_close(found[0].float(), plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "gemma4", "lfm3_vl"])
@pytest.mark.parametrize("kernels", ["reference", "cpp"])
def test_a_picture_in_small_slices_has_the_same_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kernels: str
) -> None:
    make_vision_model(tmp_path, kind)
    ops = REFERENCE if kernels == "reference" else select_ops(CPU, torch.float32, threads=1)
    encoder, picture = load(tmp_path, ops), draw_picture(131, 70)
    image = prepare(encoder.vision, picture)[1]
    whole, few = encode(encoder, picture), sum(1 for _ in encoder.encode(image))
    monkeypatch.setattr(layers, "SLICE_PATCHES", 16)
    monkeypatch.setattr(tower, "SLICE_OPERATIONS", 1.0)
    monkeypatch.setattr(attention, "_PAIRS", 1 << 10)
    found, many = encode(encoder, picture), sum(1 for _ in encoder.encode(image))
    assert few == encoder.vision.tower.num_layers
    assert many > 4 * few
    if kernels == "cpp":
        assert torch.equal(found, whole)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["glm4v", "qwen3_vl"])
def test_projectors_run_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make_vision_model(tmp_path, kind)
    encoder, picture = load(tmp_path), draw_picture(131, 70)
    image = prepare(encoder.vision, picture)[1]
    whole, few = encode(encoder, picture), sum(1 for _ in encoder.encode(image))
    monkeypatch.setattr("llmbox.engine.vision.tower.PROJECTED_PATCHES", 20)
    levels, rows = whole.shape[:2]
    assert sum(1 for _ in encoder.encode(image)) == few + levels * (-(-rows // 5) - 1)
    torch.testing.assert_close(encode(encoder, picture), whole, rtol=1e-5, atol=1e-5)


def change_tensors(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    save_file(dict(filter(None, (change(*each) for each in load_file(file).items()))), file)


def test_older_spellings_of_names_are_read(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "gemma3")
    picture = draw_picture(50, 40)
    found = encode(load(tmp_path), picture)

    def rename(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        inner = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        return inner.replace("vision_tower.", "vision_tower.vision_model."), tensor

    change_tensors(tmp_path, rename)
    assert torch.equal(encode(load(tmp_path), picture), found)


def test_factors_that_a_radio_leaves_out_are_one(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "nemotron_h_omni")
    picture = draw_picture(50, 40)

    def one(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name, torch.ones_like(tensor) if "layer_scale" in name else tensor

    change_tensors(tmp_path, one)
    found = encode(load(tmp_path), picture)
    change_tensors(tmp_path, lambda name, each: None if "layer_scale" in name else (name, each))
    assert torch.equal(encode(load(tmp_path), picture), found)


def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "qwen3_vl")
    file, name = tmp_path / "model.safetensors", "model.visual.blocks.1.mlp.linear_fc1.bias"
    whole = load_file(file)
    save_file({key: each for key, each in whole.items() if key != name}, file)
    with pytest.raises(ModelError, match=r"visual\.blocks\.1\.mlp\.linear_fc1\.bias.* is missing"):
        read_vision(tmp_path)
    save_file(whole | {name: torch.zeros(79)}, file)
    with pytest.raises(
        ModelError, match=r"linear_fc1\.bias.* has shape \[79\], config\.json asks for \[80\]"
    ):
        read_vision(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"quantization_config": {"quant_method": "gptq"}})
    assert read_vision(tmp_path) is None  # other tools quantize towers too
    assert "its vision tower is quantized" in find_vision(tmp_path)[1]
    write_json(tmp_path / "config.json", config)
    save_file({key: each for key, each in whole.items() if ".visual." not in key}, file)
    assert read_vision(tmp_path) is None
    assert "no tensors of the vision tower" in find_vision(tmp_path)[1]


def test_a_family_whose_tower_is_not_read_says_so(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "who", "vision_config": {}})
    assert read_vision(tmp_path) is None
    assert find_vision(tmp_path)[1].startswith("the vision tower of who is not supported; docs/models.md")
    tower = {"vision_config": {"mm_posemb_size": 99}, "hidden_size": 64}
    write_json(tmp_path / "config.json", {"model_type": "gemma4_unified", **tower})
    assert "max_soft_tokens 280 is beyond the 99 positions" in find_vision(tmp_path)[1]
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    assert "without a vision tower" in find_vision(tmp_path)[1]
