"""Pixels and texts of pictures: those of the image processors in transformers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbox.app.sandbox.image_worker import make_tiles
from llmbox.engine.model_config.vision.config import VisionConfig
from llmbox.engine.model_config.vision.layout import ImageSizeError, lay_out_image
from support.tiny_models import write_json
from support.vision_models import TEXT, draw_picture, read_vision

SIZES = [(1, 1), (30, 2000), (1023, 769), (97, 211), (640, 8), (336, 336), (260, 1301)]
"""Width and height."""
CLIP_LARGE = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model": {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
        "processor": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 1540},
            "patch_size": {"height": 28, "width": 28},
        },
    },
    "llava": {
        "model": {
            "vision_config": {"model_type": "pixtral", "patch_size": 16},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "processor": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 1024},
            "patch_size": {"height": 16, "width": 16},
        },
    },
    "idefics3": {
        "model": {"vision_config": {"patch_size": 16, "image_size": 512}, "scale_factor": 4},
        "processor": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 1024},
            "max_image_size": {"longest_edge": 512},
        },
    },
    "gemma3": {
        "model": {"vision_config": {"patch_size": 14, "image_size": 896}, "mm_tokens_per_image": 256},
        "processor": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 896, "width": 896},
            "do_pan_and_scan": None,
            "resample": 2,
        },
    },
    "gemma3 with crops": {
        "model": {
            "model_type": "gemma3",
            "vision_config": {"patch_size": 14, "image_size": 896},
            "mm_tokens_per_image": 256,
        },
        "processor": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 896, "width": 896},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
    },
    "qwen2_vl": {
        "model": {"vision_config": {"hidden_size": 64}},
        "processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 1003520,
            "patch_size": 14,
        },
    },
    "qwen3_vl": {
        "model": {"vision_config": {"out_hidden_size": 64}},
        "processor": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 1638400, "shortest_edge": 65536},
            "patch_size": 16,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    },
    "lfm3_vl": {
        "model": {"vision_config": {"patch_size": 16}},
        "processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"longest_edge": 1048576, "shortest_edge": 65536},
            "patch_size": 16,
        },
    },
    "gemma4": {
        "model": {"vision_config": {"model_type": "gemma4_vision"}},
        "processor": {"image_processor_type": "Gemma4ImageProcessor"},
    },
    # Its own processor needs torchvision; it resizes as that of Gemma 4 and joins 3 x 3 patches.
    "gemma4_unified": {
        "model": {"vision_config": {"model_type": "gemma4_unified_vision"}},
        "processor": {"image_processor_type": "Gemma4ImageProcessor"},
    },
    "internvl": {
        "model": {"vision_config": {"image_size": [448, 448]}},
        "processor": {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "size": {"height": 448, "width": 448},
            "max_patches": 12,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
    },
    "minicpmv4_6": {
        "model": {"vision_config": {"patch_size": 14, "image_size": 980}, "insert_layer_id": 6},
        "processor": {"image_processor_type": "MiniCPMV4_6ImageProcessor"},
    },
    "llava with CLIP": {
        "model": {"model_type": "llava", "vision_config": CLIP_LARGE},
        "processor": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
    },
    "llava_next": {
        "model": {"vision_config": CLIP_LARGE},
        "processor": {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
    },
    "llava_onevision": {
        "model": {"vision_config": {"image_size": 384, "patch_size": 14}},
        "processor": {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 384, "width": 384},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    },
    "glm4v": {
        "model": {"vision_config": {"out_hidden_size": 64}},
        "processor": {
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        },
    },
    "aya_vision": {
        "model": {"vision_config": {"image_size": 364, "patch_size": 14}},
        "processor": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 364, "width": 364},
            "crop_to_patches": True,
            "max_patches": 12,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    },
    "ovis2": {
        "model": {"vision_config": {"image_size": 448, "patch_size": 14, "hidden_stride": 2}},
        "processor": {
            "image_processor_type": "Ovis2ImageProcessor",
            "size": {"height": 448, "width": 448},
            "crop_to_patches": True,
            "max_patches": 9,
        },
    },
    "video_llama_3": {
        "model": {"vision_config": {"patch_size": 14}},
        "processor": {"image_processor_type": "VideoLlama3ImageProcessor"},
    },
    "paddleocr_vl": {
        "model": {"vision_config": {"image_size": 384}},
        "processor": {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "min_pixels": 147384,
            "max_pixels": 2822400,
            "temporal_patch_size": 1,
        },
    },
    "glm_ocr": {
        "model": {"vision_config": {"out_hidden_size": 64}},
        "processor": {"image_processor_type": "Glm46VImageProcessor"},
    },
}
"""Facts of published models that decide the pixels."""


def read(directory: Path, kind: str) -> VisionConfig:
    facts = PUBLISHED[kind]
    write_json(directory / "config.json", {"model_type": kind, "text_config": TEXT} | facts["model"])
    write_json(directory / "preprocessor_config.json", facts["processor"])
    vision = read_vision(directory)
    assert vision is not None
    return vision


def tiles_of_transformers(directory: Path, vision: VisionConfig, picture: Any) -> list[np.ndarray]:
    """Return tiles as [height, width, 3] of levels, from what the processor gives the model."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(directory)
    options: dict[str, Any] = {"canvas": {"crop_to_patches": True}}.get(vision.processor.kind, {})
    if vision.processor.kind == "longest_edge":
        options = {"patch_size": vision.processor.unit}
    found = processor(images=[picture], return_tensors="np", **options)
    values = found["pixel_values"]
    if "image_grid_thw" in found:
        _, rows, columns = found["image_grid_thw"][0]
        side, merge, frames = vision.tower.patch_size, vision.tower.merge, vision.tower.frames
        if values.ndim == 4:  # PaddleOCR-VL's patches are line by line
            merge = 1
        shape = (rows // merge, columns // merge, merge, merge, 3, frames, side, side)
        values = values.reshape(shape)[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6)
        values = values.reshape(1, 3, rows * side, columns * side)
    elif "target_sizes" in found:
        return tiles_of_stream(vision, values[0], found["target_sizes"])
    elif "image_position_ids" in found:
        side, places = math.isqrt(values.shape[-1] // 3), found["image_position_ids"][0]
        rows, columns = places[:, 1].max() + 1, places[:, 0].max() + 1
        patches = values[0, : rows * columns].reshape(rows, columns, side, side, 3)
        values = patches.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * side, columns * side)
    else:
        values = values.reshape(-1, *values.shape[-3:])
    mean, std = (np.array(each).reshape(3, 1, 1) for each in (vision.processor.mean, vision.processor.std))
    levels = (values * std + mean) * 255
    return [np.rint(tile).astype(int).transpose(1, 2, 0) for tile in levels]


def tiles_of_stream(vision: VisionConfig, stream: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Return tiles of levels from patches side by side, [3, side, side of all patches] (MiniCPM-V)."""
    mean, std = (np.array(each).reshape(3, 1, 1) for each in (vision.processor.mean, vision.processor.std))
    levels, side, tiles = (stream * std + mean) * 255, vision.tower.patch_size, []
    for rows, columns in sizes:
        part, levels = np.split(levels, [rows * columns * side], axis=2)
        patches = part.reshape(3, side, rows, columns, side).transpose(2, 1, 3, 4, 0)
        tiles.append(np.rint(patches.reshape(rows * side, columns * side, 3)).astype(int))
    return tiles


@pytest.mark.parametrize("kind", PUBLISHED)
def test_pixels_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    vision = read(tmp_path, kind)
    for width, height in SIZES:
        picture = draw_picture(width, height)
        try:
            layout = lay_out_image(vision, width, height)
        except ImageSizeError:
            with pytest.raises(ValueError, match="aspect ratio"):
                tiles_of_transformers(tmp_path, vision, picture)
            continue
        ours = [np.asarray(tile).astype(int) for tile in make_tiles(picture, vision, layout)]
        theirs = tiles_of_transformers(tmp_path, vision, picture)
        assert [tile.shape[:2] for tile in ours] == [tile.shape[:2] for tile in theirs] == list(layout.tiles)
        assert max(abs(ours[n] - theirs[n]).max() for n in range(len(ours))) <= 1


def test_kimi_pads_with_black_below_and_on_the_right(tmp_path: Path) -> None:
    write_json(
        tmp_path / "config.json",
        {"model_type": "kimi_k25", "text_config": TEXT, "vision_config": {"depth": 1}},
    )
    vision = read_vision(tmp_path)
    assert vision is not None
    picture = draw_picture(97, 211)
    (tile,) = make_tiles(picture, vision, lay_out_image(vision, 97, 211))
    assert tile.size == (112, 224)
    assert np.array_equal(np.asarray(tile)[:211, :97], np.asarray(picture))
    assert not np.asarray(tile)[211:].any()
    assert not np.asarray(tile)[:, 97:].any()
