"""Layouts of pictures: sizes, numbers of tokens, texts, and files that contradict each other."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbox.engine.model_config.vision.config import VisionConfig
from llmbox.engine.model_config.vision.families import find_vision
from llmbox.engine.model_config.vision.layout import ImageSizeError, lay_out_image
from support.tiny_models import write_json
from support.vision_models import MODELS, TEXT, read_vision


def read(directory: Path, kind: str, **processor: Any) -> VisionConfig:
    _, values, rules = MODELS[kind]
    write_json(directory / "config.json", {"model_type": kind.removesuffix("_clip"), **values})
    write_json(directory / "preprocessor_config.json", rules | processor)
    vision = read_vision(directory)
    assert vision is not None
    return vision


@pytest.mark.parametrize("kind", MODELS)
def test_each_row_has_one_image_token_in_the_text(tmp_path: Path, kind: str) -> None:
    vision = read(tmp_path, kind)
    for width in (1, 7, 50, 200, 900):
        for height in (9, 48, 333):
            for low in (False, True):
                try:
                    layout = lay_out_image(vision, width, height, low_detail=low)
                except ImageSizeError:
                    assert max(width, height) > 90 * min(width, height)
                    continue
                assert layout.text.count(vision.image_text) == layout.num_rows > 0
                pixels = sum(tall * wide for tall, wide in layout.tiles)
                if vision.processor.kind not in {
                    "anyres",
                    "covered_canvas",
                }:  # with rows beside those of tiles
                    assert pixels == layout.num_rows * vision.processor.unit**2
                if layout.grid != (0, 0):
                    assert layout.grid[0] * layout.grid[1] == layout.num_rows
                if low:  # of a thin image on a canvas nothing may be left, not even the end of a line
                    whole = lay_out_image(vision, width, height)
                    ends = int(vision.processor.kind == "anyres" and whole.num_rows == 36)
                    assert layout.num_rows <= whole.num_rows + ends


def test_texts_around_image_tokens(tmp_path: Path) -> None:
    from transformers import Gemma3Processor

    mistral = lay_out_image(read(tmp_path, "mistral3"), 36, 20)
    assert mistral.text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    tile = "<image>" * 9
    fake = "<fake_token_around_image>"
    assert lay_out_image(read(tmp_path, "idefics3"), 90, 60).text == (
        f"{fake}<row_1_col_1>{tile}{fake}<row_1_col_2>{tile}{fake}<row_1_col_3>{tile}\n"
        f"{fake}<row_2_col_1>{tile}{fake}<row_2_col_2>{tile}{fake}<row_2_col_3>{tile}\n"
        f"\n{fake}<global-img>{tile}{fake}"
    )
    low = lay_out_image(read(tmp_path, "idefics3"), 90, 60, low_detail=True)
    assert low.text == f"{fake}<global-img>{tile}{fake}"
    gemma = lay_out_image(read(tmp_path, "gemma3"), 5, 5).text
    assert gemma == f"\n\n<start_of_image>{'<image_soft_token>' * 9}<end_of_image>\n\n"
    scanning = read(tmp_path, "gemma3", do_pan_and_scan=True, pan_and_scan_min_crop_size=32)
    for size, count in (((128, 100), 2), ((96, 400), 4), ((100, 90), 0), ((2000, 31), 0)):
        layout = lay_out_image(scanning, *size)
        stub = SimpleNamespace(full_image_sequence=gemma)
        assert layout.text == Gemma3Processor.replace_image_token(stub, {"num_crops": [count]}, 0)
        assert (layout.num_rows, len(layout.tiles), layout.images) == (9 * (count + 1), *[count + 1] * 2)
        assert lay_out_image(scanning, *size, low_detail=True).text == gemma
    intern = read(tmp_path, "internvl")
    for size, tiles in (((90, 60), 7), ((100, 90), 5), ((47, 47), 1), ((9, 900), 7)):
        layout = lay_out_image(intern, *size)
        assert layout.text == f"<img>{'<IMG_CONTEXT>' * 9 * tiles}</img>"
        assert len(layout.tiles) == tiles
    assert lay_out_image(intern, 9, 900, low_detail=True).num_rows == 9
    qianfan = read(tmp_path, "qianfan_ocr")
    assert qianfan.placeholder == "<image>"
    assert lay_out_image(qianfan, 90, 60) == lay_out_image(intern, 90, 60)
    mini, pad = read(tmp_path, "minicpmv4_6"), "<|image_pad|>" * 4
    assert lay_out_image(mini, 120, 60, low_detail=True).text == f"<image>{'<|image_pad|>' * 3}</image>"
    assert lay_out_image(mini, 120, 60).text.endswith(f"</image><slice>{pad}</slice><slice>{pad}</slice>")
    assert lay_out_image(mini, 60, 120).text.endswith(f"<slice>{pad}</slice>\n<slice>{pad}</slice>")
    assert mini.number_text(3) == "<image_id>3</image_id>"
    lfm = lay_out_image(read(tmp_path, "lfm2_vl"), 300, 150)
    assert lfm.tile_grid == (1, 2)
    tile = "<image>" * 16
    assert lfm.text.startswith(
        f"<|image_start|><|img_row_1_col_1|>{tile}<|img_row_1_col_2|>{tile}<|img_thumb"
    )
    assert lfm.text.endswith("<image><|image_end|>")


@pytest.mark.parametrize(
    ("size", "grid", "whole"),
    [
        ((1, 1), (0, 0), (256, 256)),
        ((30, 2000), (0, 0), (2112, 32)),
        ((1023, 769), (2, 3), (416, 576)),
        ((97, 211), (0, 0), (384, 192)),
        ((640, 8), (0, 0), (32, 2304)),
        ((1500, 700), (2, 4), (320, 736)),
    ],
)
def test_tiles_of_lfm2_vl(
    tmp_path: Path, size: tuple[int, int], grid: tuple[int, int], whole: tuple[int, int]
) -> None:
    """Compare with what the processor of transformers 5.23 gives, which needs torchvision."""
    model = {"text_config": TEXT, "vision_config": {"patch_size": 16}}
    write_json(tmp_path / "config.json", {"model_type": "lfm2_vl"} | model)
    vision = read_vision(tmp_path)
    assert vision is not None
    layout = lay_out_image(vision, *size)
    tiles = ((512, 512),) * (grid[0] * grid[1])
    assert (layout.tile_grid, layout.tiles) == (grid, (*tiles, whole))


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (1, 1)),
        ((30, 2000), (6, 1)),
        ((1023, 769), (3, 4)),
        ((97, 211), (1, 1)),
        ((640, 8), (1, 2)),
        ((1500, 700), (3, 5)),
        ((3000, 2999), (4, 4)),
    ],
)
def test_tiles_and_texts_of_llama4(tmp_path: Path, size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Compare with the canvases of the processor of transformers 5.23, which needs torchvision."""
    from transformers import Llama4Processor

    sizes = {"size": {"height": 336, "width": 336}, "max_patches": 16}
    _, values, rules = MODELS["llama4"]
    tower = values["vision_config"] | {"image_size": 336}
    write_json(tmp_path / "config.json", {"model_type": "llama4", **values, "vision_config": tower})
    write_json(tmp_path / "preprocessor_config.json", rules | sizes)
    vision = read_vision(tmp_path)
    assert vision is not None
    layout = lay_out_image(vision, *size)
    count = grid[0] * grid[1]
    assert layout.tile_grid == (grid if count > 1 else (0, 0))
    assert len(layout.tiles) == count + (count > 1)
    assert layout.text == Llama4Processor._prompt_split_image(SimpleNamespace(), grid, 21**2)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (1, 1)),
        ((30, 2000), (4, 1)),
        ((1023, 769), (2, 2)),
        ((97, 211), (1, 1)),
        ((640, 8), (1, 2)),
        ((1500, 700), (2, 3)),
        ((3000, 2999), (3, 4)),
    ],
)
def test_canvases_and_texts_of_cohere(tmp_path: Path, size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Compare with the canvases of the processor of transformers 5.23, which needs torchvision."""
    from transformers import AyaVisionProcessor, Cohere2VisionProcessor

    _, values, rules = MODELS["cohere2_vision"]
    tower = values["vision_config"] | {"image_size": 512, "patch_size": 16}
    write_json(tmp_path / "config.json", {"model_type": "cohere2_vision", **values, "vision_config": tower})
    sizes = {"size": {"height": 512, "width": 512}, "max_patches": 12}
    write_json(tmp_path / "preprocessor_config.json", rules | sizes)
    vision = read_vision(tmp_path)
    assert vision is not None
    layout = lay_out_image(vision, *size)
    count = 1 if grid == (1, 1) else grid[0] * grid[1] + 1
    assert (layout.tile_grid, len(layout.tiles)) == (grid if count > 1 else (0, 0), count)
    names = {"boi": "START_OF_IMG", "image": "IMG_PATCH", "img_line_break": "IMG_LINE_BREAK"}
    names |= {"eoi": "END_OF_IMG"}
    stub = SimpleNamespace(patch_size=16, **{f"{name}_token": f"<|{text}|>" for name, text in names.items()})
    assert layout.text == Cohere2VisionProcessor.replace_image_token(stub, {"num_patches": [count]}, 0)
    aya = lay_out_image(read(tmp_path, "aya_vision"), *size)
    stub = SimpleNamespace(
        patch_size=16,
        img_size=48,
        start_of_img_token="<|START_OF_IMG|>",
        end_of_img_token="<|END_OF_IMG|>",
        img_patch_token="<|IMG_PATCH|>",
        tile_token="TILE",
        tile_global_token="TILE_GLOBAL",
    )
    assert aya.text == AyaVisionProcessor.replace_image_token(stub, {"num_patches": [len(aya.tiles)]}, 0)


@pytest.mark.parametrize(
    ("size", "inside", "whole"),
    [
        ((1, 1), (1, 1), (28, 28)),
        ((30, 2000), (2000, 30), (2016, 56)),
        ((1023, 769), (769, 1023), (784, 1036)),
        ((640, 8), (8, 640), (28, 644)),
        ((20000, 700), (250, 7168), (252, 7168)),
        ((3000, 2999), (1793, 1794), (1820, 1820)),
        ((3, 9000), (7168, 2), (7168, 28)),
    ],
)
def test_sizes_of_kimi(
    tmp_path: Path, size: tuple[int, int], inside: tuple[int, int], whole: tuple[int, int]
) -> None:
    """Compare with the sizes of the processor of transformers 5.23, which needs torchvision. Both spellings
    of the files mean the same.
    """
    text = {"model_type": "kimi_k25", "text_config": TEXT}
    write_json(tmp_path / "config.json", text | {"vision_config": {"num_hidden_layers": 3}})
    vision = read_vision(tmp_path)
    assert vision is not None
    layout = lay_out_image(vision, *size)
    assert vision.processor.unpadded_size(*size) == inside
    assert layout.tiles == (whole,)
    assert layout.text == "<|media_pad|>" * (whole[0] * whole[1] // 784)
    own = {"vt_hidden_size": 1152, "vt_num_hidden_layers": 3, "init_pos_emb_height": 64}
    own |= {"merge_kernel_size": [2, 2], "projector_ln_eps": 1e-5}
    write_json(tmp_path / "config.json", text | {"vision_config": own, "media_placeholder_token_id": 163605})
    rules = {
        "in_patch_limit": 16384,
        "patch_limit_on_one_side": 512,
        "merge_kernel_size": 2,
        "patch_size": 14,
    }
    write_json(tmp_path / "preprocessor_config.json", {"media_proc_cfg": rules | {"image_mean": [0.5] * 3}})
    assert read_vision(tmp_path) == vision


@pytest.mark.parametrize(
    ("size", "whole"),
    [
        ((1, 1), (512, 512)),
        ((30, 2000), (4064, 96)),
        ((1023, 769), (800, 1024)),
        ((640, 8), (96, 3264)),
        ((20000, 700), (320, 9824)),
        ((3000, 2999), (1824, 1856)),
        ((3, 9000), (12160, 32)),
    ],
)
def test_sizes_of_nemotron_omni(tmp_path: Path, size: tuple[int, int], whole: tuple[int, int]) -> None:
    """Compare with the sizes of the processor of transformers 5.23, which needs torchvision. Keys are those
    of the published files.
    """
    model = {"model_type": "nemotron_h_omni", "llm_config": TEXT, "img_context_token_id": 18}
    model |= {"vision_config": {"patch_size": 16}, "vit_hidden_size": 1280}
    write_json(tmp_path / "config.json", model)
    write_json(tmp_path / "preprocessor_config.json", {"norm_mean": [0.1] * 3, "norm_std": [0.2] * 3})
    vision = read_vision(tmp_path)
    assert vision is not None
    assert (vision.processor.mean, vision.processor.std) == ((0.1,) * 3, (0.2,) * 3)
    layout = lay_out_image(vision, *size)
    assert layout.tiles == (whole,)
    assert layout.text == f"<img>{'<image>' * (whole[0] * whole[1] // 1024)}</img>"


def test_pictures_that_processors_refuse(tmp_path: Path) -> None:
    with pytest.raises(ImageSizeError, match="200 times as many"):
        lay_out_image(read(tmp_path, "qwen2_vl"), 1, 201)
    with pytest.raises(ImageSizeError, match="200 times as many"):
        lay_out_image(read(tmp_path, "llava_clip"), 1, 201)
    with pytest.raises(ImageSizeError, match="200 times as many"):
        lay_out_image(read(tmp_path, "glm4v"), 2, 5000)
    with pytest.raises(ImageSizeError, match="200 times as many"):
        lay_out_image(read(tmp_path, "paddleocr_vl"), 9000, 8)
    with pytest.raises(ImageSizeError, match="too thin"):
        lay_out_image(read(tmp_path, "mistral3"), 1, 30000)
    with pytest.raises(ImageSizeError, match="has none"):
        lay_out_image(read(tmp_path, "gemma3"), 0, 5)
    assert lay_out_image(read(tmp_path, "idefics3"), 1, 30000).num_rows == 36


@pytest.mark.parametrize(
    ("kind", "tower", "processor", "text"),
    [
        ("mistral3", {"hidden_act": "tanh"}, {}, "hidden_act 'tanh' is not supported"),
        ("mistral3", {"patch_size": [4, 6]}, {}, "only squares"),
        ("mistral3", {"num_attention_heads": 5}, {}, "not a multiple"),
        ("mistral3", {}, {"size": {"longest_edge": 10**9}}, "beyond anything known"),
        ("idefics3", {}, {"max_image_size": {"longest_edge": 40}}, "no whole squares of 2 x 2"),
        ("gemma3", {}, {"do_pan_and_scan": "yes"}, "do_pan_and_scan must be true or false"),
        ("gemma3", {}, {"size": {"height": 32, "width": 32}}, "that of the tower"),
        ("qwen3_vl", {"deepstack_visual_indexes": [7]}, {}, "must be different layers"),
        ("qwen3_vl", {"out_hidden_size": 63}, {}, "not those of the language model"),
        ("qwen3_vl", {}, {"patch_size": 7}, "not that of the tower"),
        ("qwen3_vl", {}, {"resample": 9}, "filter of Pillow"),
        ("qwen3_vl", {}, {"image_std": [0, 1, 1]}, "std above 0"),
        ("qwen3_vl", {}, {"size": {"shortest_edge": 9, "longest_edge": 9}}, "fewer than"),
        ("lfm2_vl", {}, {"tile_size": 63}, "tile_size 63"),
        (
            "lfm3_vl",
            {"layer_types": ["conv", "conv", "conv", ["conv"]]},
            {},
            "conv or full_attention for each",
        ),
        ("lfm3_vl", {"num_key_value_heads": 3}, {}, "cannot share 3"),
        ("lfm3_vl", {"conv_kernel_size": 4}, {}, "only odd numbers"),
        ("internvl", {"norm_type": "batch"}, {}, "norm_type 'batch' is not supported"),
        ("internvl", {"use_mean_pooling": False}, {}, "use_mean_pooling False is not supported, only True"),
        ("internvl", {"use_qk_norm": True, "layer_norm_eps": 1e-5}, {}, "not supported with use_qk_norm"),
        ("internvl", {}, {"size": {"height": 40, "width": 40}}, "no whole squares of 2 x 2 patches of 8"),
        ("internvl", {}, {"max_patches": 65}, "max_patches 65 is beyond"),
        ("internvl", {}, {"min_patches": 9}, "min_patches 9 is beyond"),
        ("glm4v", {"out_hidden_size": 32}, {}, "not those of the language model"),
        ("glm4v", {}, {"merge_size": 3}, "merge_size 3 is not that of the tower"),
        ("llama4", {"intermediate_size": 96}, {}, "intermediate_size 96 is not that of 2 x 2 patches"),
        ("llama4", {"projector_output_dim": 48}, {}, "projector_output_dim 48 is not supported, only 40"),
        ("llama4", {"num_attention_heads": 8}, {}, "heads of 6 numbers are no multiple of 4"),
        (
            "llama4",
            {},
            {"resize_to_max_canvas": True},
            "resize_to_max_canvas True is not supported, only False",
        ),
        ("llama4", {}, {"size": {"height": 96, "width": 96}}, "size must be that of the tower, 48"),
        ("llava_clip", {"model_type": "vit"}, {}, "a tower of 'vit' is not supported in LLaVA"),
        ("llava_clip", {"model_type": "siglip_vision_model"}, {}, "'default' is not supported for a tower"),
        ("llava_clip", {}, {"crop_size": 40}, "size and crop_size must be that of the tower, 48"),
        ("llava_clip", {}, {"size": {"shortest_edge": 60}}, "size and crop_size must be that of the tower"),
        ("llava_clip", {}, {"do_center_crop": False}, "do_center_crop false with shortest_edge"),
        ("llava_clip", {}, {"do_pad": True}, "do_pad True is not supported, only False"),
        ("gemma4", {"num_key_value_heads": 1}, {}, "num_key_value_heads"),
        ("llava_next", {"model_type": "vit"}, {}, "a tower of 'vit' is not supported in LLaVA"),
        ("aya_vision", {"model_type": "pixtral"}, {}, "a tower of 'pixtral' is not supported in LLaVA"),
        ("internvl", {}, {"do_rescale": False}, "do_rescale false is not supported"),
        ("llava_next", {}, {"crop_size": 40, "do_center_crop": True}, "must be that of the tower, 48"),
        (
            "llava_next",
            {},
            {"image_grid_pinpoints": [[48, 48]]},
            "image_grid_pinpoints is not that of config",
        ),
        ("llava_onevision", {}, {"size": {"height": 48, "width": 40}}, "must be that of the tower, 48"),
        (
            "aya_vision",
            {"model_type": "clip_vision_model"},
            {},
            "'full' is not supported for a tower",
        ),
        ("aya_vision", {"image_size": 40}, {"size": {"height": 40, "width": 40}}, "squares of 2 x 2 patches"),
        ("aya_vision", {}, {"size": {"height": 96, "width": 96}}, "size must be that of the tower, 48"),
        (
            "ovis2",
            {"tokenize_function": "gumbel_argmax"},
            {},
            "'gumbel_argmax' is not supported, only 'softmax'",
        ),
        ("nemotron_h_omni", {"use_swiglu_ffn": True}, {}, "use_swiglu_ffn True is not supported, only False"),
        ("nemotron_h_omni", {"hidden_size": 64}, {}, "vision_hidden_size 48 is not supported, only 64"),
        ("nemotron_h_omni", {}, {"min_num_patches": 1, "max_num_patches": 3}, "max_num_patches 3 are fewer"),
        ("ovis2", {"vocab_size": 5}, {}, "vocab_size 5 leaves no visual token"),
        ("ovis2", {"hidden_stride": 4}, {}, "no whole squares of 4 x 4 patches"),
        ("ovis2", {}, {"use_covering_area_grid": False}, "use_covering_area_grid False is not supported"),
        ("video_llama_3", {}, {"merge_size": 2}, "merge_size 2 is not supported, only 1"),
        ("vipllava", {"model_type": "pixtral"}, {}, "a tower of 'pixtral' is not supported in LLaVA"),
        ("qwen3_omni_moe_thinker", {"deepstack_visual_indexes": [3]}, {}, "must be different layers of 3"),
        ("qwen2_5_omni_thinker", {"out_hidden_size": 63}, {}, "not those of the language model"),
        ("kimi_k25", {"pos_emb_width": 6}, {}, "only a square of positions"),
        ("kimi_k25", {"num_attention_heads": 8}, {}, "heads of a multiple of 4 numbers"),
        ("kimi_vl", {}, {"pad_input": False}, "pad_input False is not supported, only True"),
        ("kimi_k25", {}, {"merge_size": 3}, "merge_size 3 is not that of the tower, 2"),
        ("kimi_k25", {}, {"size": {"max_height": 0, "max_width": 0}}, "max_height"),
        ("cohere2_vision", {}, {"max_patches": 65}, "max_patches 65 is beyond"),
        ("qianfan_ocr", {"use_qk_norm": True}, {}, "use_qk_norm True is not supported, only False"),
        ("paddleocr_vl", {}, {"temporal_patch_size": 2}, "temporal_patch_size 2 is not that of the tower, 1"),
        ("minicpmv4_6", {"window_kernel_size": [4, 4]}, {}, "squares of 2 x 2"),
        ("minicpmv4_6", {}, {"downsample_mode": "4x"}, "downsample_mode '4x' is not supported, only '16x'"),
        ("minicpmv4_6", {}, {"scale_resolution": 16}, "scale_resolution 16 is less than 32"),
        ("exaone4_5", {"num_key_value_heads": 3}, {}, "4 heads cannot share 3 of keys"),
        ("glm_ocr", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {}, "not supported for"),
    ],
)
def test_files_that_contradict_each_other_leave_text_and_name_the_key(
    tmp_path: Path, kind: str, tower: dict[str, Any], processor: dict[str, Any], text: str
) -> None:
    _, values, rules = MODELS[kind]
    changed = values | {"model_type": kind.removesuffix("_clip")}
    changed |= {"vision_config": values["vision_config"] | tower}
    write_json(tmp_path / "config.json", changed)
    write_json(tmp_path / "preprocessor_config.json", rules | processor)
    assert read_vision(tmp_path) is None
    assert text in find_vision(tmp_path)[1]


@pytest.mark.parametrize(
    ("kind", "key", "value", "text"),
    [
        ("llava_next", "image_grid_pinpoints", [[48, 50]], "must be heights and widths of at most 64 tiles"),
        ("llava_next", "image_grid_pinpoints", [[480, 480]], "must be heights and widths of at most 64"),
        ("llava_next", "image_grid_pinpoints", "all", "must be heights and widths of at most 64 tiles of 48"),
        ("llava_next", "image_grid_pinpoints", [["48", 48]], "must be heights and widths of at most 64"),
        ("llava_next", "vision_feature_layer", [-1, 9], r"[-1, 9] is not supported, only some of 2 layers"),
        ("llava_next", "vision_feature_layer", [], "[] is not supported, only some of 2 layers"),
        ("internvl", "downsample_ratio", 0, "downsample_ratio 0.0 is not supported, only 1, 1/2"),
        ("internvl", "downsample_ratio", 0.4, "downsample_ratio 0.4 is not supported, only 1, 1/2"),
        ("minicpmv4_6", "downsample_mode", "8x", "downsample_mode '8x' is not supported, only '4x' or '16x'"),
        ("minicpm_ocr", "insert_layer_id", 3, "insert_layer_id 3 must be one of 3 layers"),
        ("kimi_k25", "projection_hidden_size", 40, "projection_hidden_size 40 is not supported, only 48"),
        ("aya_vision", "vision_feature_layer", [-2, -1], "only one vision_feature_layer"),
        ("cohere2_vision", "alignment_intermediate_size", 41, "an even alignment_intermediate_size"),
        ("llava_onevision", "vision_aspect_ratio", "anyres", "'anyres' is not supported, only anyres_max_9"),
        ("llava_onevision", "vision_aspect_ratio", "anyres_max_0", "'anyres_max_0' is not supported"),
    ],
)
def test_values_of_config_json_that_are_refused(
    tmp_path: Path, kind: str, key: str, value: Any, text: str
) -> None:
    _, values, rules = MODELS[kind]
    write_json(tmp_path / "config.json", values | {"model_type": kind, key: value})
    rules = {name: rule for name, rule in rules.items() if name != key}
    write_json(tmp_path / "preprocessor_config.json", rules)
    assert read_vision(tmp_path) is None
    assert text in find_vision(tmp_path)[1]


@pytest.mark.parametrize(
    ("kind", "size", "rows"),
    [
        ("llava_next", (336, 336), 576 + 24 * 25),
        ("llava_next", (700, 700), 576 + 48 * 49),
        ("llava_next", (1, 3000), 576 + 24),
        ("llava_onevision", (1024, 1024), 729 + 81 * 82),
        ("llava_onevision", (2300, 2304), 729 + 81 * 82),
        ("llava_onevision", (384, 100), 729 + 7 * 28),
    ],
)
def test_rows_of_llava_next_as_published(tmp_path: Path, kind: str, size: tuple[int, int], rows: int) -> None:
    """Compare with the rows that the processors of transformers count."""
    import transformers

    is_next = kind == "llava_next"
    side, patch, across = (336, 14, 24) if is_next else (384, 14, 27)
    tower = {"image_size": side, "patch_size": patch}
    rules = {"size": {"height": side, "width": side}}
    write_json(tmp_path / "config.json", {"model_type": kind, "text_config": TEXT, "vision_config": tower})
    write_json(tmp_path / "preprocessor_config.json", rules)
    vision = read_vision(tmp_path)
    assert vision is not None
    name = "LlavaNext" if is_next else "LlavaOnevision"
    theirs = SimpleNamespace(
        image_processor=getattr(transformers, f"{name}ImageProcessorPil")(),
        patch_size=patch,
        num_additional_image_tokens=0,
        num_image_tokens=across**2,
        vision_aspect_ratio="anyres_max_9",
    )
    processor = getattr(transformers, f"{name}Processor")
    theirs._get_unpadded_features = lambda *sizes: processor._get_unpadded_features(theirs, *sizes)
    counted = processor._get_number_of_features(theirs, size[1], size[0], side, side)
    assert lay_out_image(vision, *size).num_rows == counted == rows
    assert lay_out_image(vision, *size, low_detail=True).num_rows == across**2 + 1


def test_a_nested_processor_is_read(tmp_path: Path) -> None:
    vision = read(tmp_path, "idefics3")
    write_json(
        tmp_path / "processor_config.json", {"image_processor": MODELS["idefics3"][2] | {"resample": 3}}
    )
    again = read_vision(tmp_path)
    assert again is not None
    assert again.processor == replace(vision.processor, resample=3)
