"""Families with other towers or tiles: InternVL, Llama 4, Idefics3, LFM2-VL and MiniCPM-V."""

from typing import Final

from ..fields import MAX_WIDTH
from .config import (
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    LINEARS,
    MAX_SIDE,
    TileText,
    TowerNames,
    projections,
    siglip_names,
)
from .fields import (
    MAX_TILES,
    FieldReader,
    FieldRule,
    Inverse,
    Key,
    Side,
    VisionFamily,
    feature_layer,
    hidden_act,
    image_token,
    merged_width,
    sizes,
    token_text,
)
from .llava import OTHER_SIZES, PATCH_COUNTS, SIGLIP, tile_counts

ODD_TILES: Final[dict[str, FieldRule]] = {
    "processor: tiles of {at.tile} pixels have no whole squares of {at.merge} x {at.merge} "
    "patches of {at.patch_size}": lambda at: at.tile < at.unit or at.tile // at.patch_size % at.merge
}


_FAKE: Final = "<fake_token_around_image>"
IDEFICS3: Final = SIGLIP.but(
    "SmolVLM, Idefics3",
    siglip_names("vision_model.", "", "connector.modality_projection.proj", ""),
    refuse={**ODD_TILES},
    **sizes(1152, 3072, 12, patch=32),
    table="buckets",
    merge=Key("model.scale_factor", 2, MAX_TILES),
    projector="pixel_shuffle",
    kind="tiles",
    longest=Key("size.longest_edge", 4 * 364, MAX_SIDE),
    tile=Key("max_image_size.longest_edge", 364, MAX_SIDE),
    splits=Key("do_image_splitting", default=True),
    usual_pixels=(HALF, HALF, 1),
    image_token_id=image_token(128257),
    tile_text=TileText(
        tile=f"{_FAKE}<row_{{row}}_col_{{column}}>{{tokens}}",
        row_join="\n",
        tiles_end="\n\n",
        whole=f"{_FAKE}<global-img>{{tokens}}{_FAKE}",
    ),
)


LFM2_VL: Final = SIGLIP.but(
    "LFM2-VL",
    {"projector": ("multi_modal_projector.layer_norm", *LINEARS)},
    only={"processor.encoder_patch_size": lambda at: at.patch_size},
    refuse={
        "config: vision_feature_layer is not supported, only the last layer": lambda at: (
            feature_layer(at) != at.num_layers
        ),
        "processor: tile_size {at.tile} is not of whole units of {at.unit} pixels": lambda at: (
            at.tile % at.unit
        ),
    },
    channels_last=True,
    table="antialiased",
    table_rows=Key("num_patches", 256, MAX_WIDTH),
    merge=Key("model.downsample_factor", 2, MAX_TILES),
    projector="pixel_shuffle_mlp",
    projector_size=Key("model.projector_hidden_size", 2560, MAX_WIDTH),
    projector_bias=Key("model.projector_bias", default=True),
    projector_norm=Key("model.projector_use_layernorm", default=True),
    projector_eps=1e-5,
    kind="lfm2",
    tile=Key("tile_size", 512, MAX_SIDE),
    may_split=Key("processor.do_image_splitting", default=True),
    splits=lambda at: at.may_split and at.tile_counts != (1, 1),
    least_tokens=Key("processor.min_image_tokens", 64, 1 << 16),
    most_tokens=Key("processor.max_image_tokens", 256, 1 << 16),
    least=lambda at: at.least_tokens * at.unit**2,
    most=lambda at: at.most_tokens * at.unit**2,
    least_tiles=Key("processor.min_tiles", 2, MAX_TILES),
    most_tiles=Key("processor.max_tiles", 10, MAX_TILES),
    tile_counts=lambda at: (at.least_tiles, at.most_tiles),
    thumbnail=Key("use_thumbnail", default=True),
    tolerance=Key("max_pixels_tolerance", 2.0),
    usual_pixels=(HALF, HALF, 2),
    image_token_id=image_token(396),
    start="<|image_start|>",
    end="<|image_end|>",
    tile_text=TileText(
        tile="<|img_row_{row}_col_{column}|>{tokens}", whole="<|img_thumbnail|>{tokens}", single="{tokens}"
    ),
)


INTERNVL: Final = VisionFamily(
    name="InternVL",
    names=TowerNames(
        patch="vision_tower.embeddings.patch_embeddings.projection",
        layers="vision_tower.encoder.layer",
        class_embedding="vision_tower.embeddings.cls_token",
        table="vision_tower.embeddings.position_embeddings",
        norms=("layernorm_before", "layernorm_after"),
        scales=("lambda_1", "lambda_2"),
        qkv=projections("attention"),
        output="attention.projection_layer",
        qk_norms=("attention.q_norm", "attention.k_norm"),
        projector=("multi_modal_projector.layer_norm", *LINEARS),
    ),
    rules={
        **sizes(1024, 4096, 24),
        "num_layers": feature_layer,
        "activation": hidden_act("gelu"),
        "norm": Key("norm_type", "layer_norm"),
        "is_rms": lambda at: at.norm == "rms_norm",
        "attention_bias": Key("attention_bias", default=False),
        "output_bias": True,
        "wide_norms": Key("use_qk_norm", default=False),
        "other_names": lambda at: {} if at.wide_norms else {"qk_norms": ()},
        "image_side": Side("image_size", 448),
        "table": "bicubic",
        "merge": Inverse("model.downsample_ratio", 0.5),
        "projector": "pixel_shuffle_mlp",
        "projector_bias": True,
        "projector_eps": 1e-5,
        "kind": "canvas",
        "tile": Side("size", lambda at: at.image_side),
        # Its processor asks for tiles whatever `crop_to_patches` of the file says.
        **tile_counts(*PATCH_COUNTS),
        "image_token_id": image_token(151667),
        "image_text": token_text("context_image_token", "<IMG_CONTEXT>"),
        "start": token_text("start_image_token", "<img>"),
        "end": token_text("end_image_token", "</img>"),
        "tile_text": TileText(tile="{tokens}", whole="{tokens}"),
    },
    only={
        "vision_feature_select_strategy": "default",
        "tower.use_absolute_position_embeddings": True,
        "tower.use_mean_pooling": True,
    },
    refuse={
        "tower: norm_type {at.norm!r} is not supported, only layer_norm or rms_norm": lambda at: (
            at.norm not in {"layer_norm", "rms_norm"}
        ),
        "tower: layer_norm_eps {at.eps} is not supported with use_qk_norm, only 1e-6": lambda at: (
            at.wide_norms and at.eps != 1e-6
        ),
        **ODD_TILES,
    },
)
_OWN_NAMES: Final = TowerNames(
    patch="vision_model.embeddings.patch_embedding",
    layers="vision_model.encoder.layers",
    class_embedding="vision_model.embeddings.class_embedding",
    table="vision_model.embeddings.position_embedding",
    scales=("ls1", "ls2"),
    qk_norms=("attn.q_norm", "attn.k_norm"),
    projector=("mlp1.0", "mlp1.1", "mlp1.3"),
)
INTERNVL_CHAT: Final = INTERNVL.but(
    "InternVL",
    _OWN_NAMES,
    only={"ps_version": "v2", "use_thumbnail": True},
    **sizes(3200, 12800, 48, heads=25),
    image_side=Side("image_size", 224),
    norm=Key("norm_type", "rms_norm"),
    attention_bias=Key("qkv_bias", default=False),
    wide_norms=Key("qk_normalization", default=True),
    tile=Side("model.force_image_size", lambda at: at.image_side),
    is_cut=Key("model.dynamic_image_size", default=False),
    most_cut=Key("model.max_dynamic_patch", 6, MAX_TILES),
    **tile_counts(Key("model.min_dynamic_patch", 1), lambda at: at.most_cut if at.is_cut else 1),
    usual_pixels=(IMAGENET_MEAN, IMAGENET_STD, 3),
    image_token_id=lambda at: at.files.token_id(at.image_text),
    placeholder="<image>",
)
"""InternVL as its authors publish it: the same model under other keys and names."""
QIANFAN_OCR: Final = INTERNVL.but(
    "Qianfan-OCR",
    _OWN_NAMES,
    only={"tower.use_qk_norm": False},
    attention_bias=Key("attention_bias", default=True),
    placeholder="<image>",
)


_ADAPTER: Final = "vision_model.vision_adapter.mlp"
LLAMA4: Final = VisionFamily(
    name="Llama 4",
    names=TowerNames(
        patch="vision_model.patch_embedding.linear",
        layers="vision_model.model.layers",
        class_embedding="vision_model.class_embedding",
        table="vision_model.positional_embedding_vlm",
        pre_norm="vision_model.layernorm_pre",
        post_norm="vision_model.layernorm_post",
        norms=("input_layernorm", "post_attention_layernorm"),
        qkv=projections("self_attn"),
        output="self_attn.o_proj",
        projector=("", f"{_ADAPTER}.fc1", f"{_ADAPTER}.fc2", LINEARS[0]),
    ),
    rules={
        **sizes(768, 5632, 34),
        "activation": "gelu",
        "eps": 1e-5,
        "patch_bias": False,
        "image_side": Side("image_size", 448),
        "table": "whole",
        "class_is_last": True,
        "rope": "pairs",
        "merge": Inverse("pixel_shuffle_ratio", 0.5),
        "projector": "llama4",
        "projector_size": Key("projector_input_dim", 4096, MAX_WIDTH),
        "kind": "padded_canvas",
        "tile": lambda at: at.image_side,
        **tile_counts(1, Key("processor.max_patches", 16, MAX_TILES)),
        "usual_pixels": (HALF, HALF, 2),
        "image_token_id": image_token(200092),
        "placeholder": "<|image|>",
        "image_text": "<|patch|>",
        "start": "<|image_start|>",
        "end": "<|image_end|>",
        "tile_text": TileText(
            tile="{tokens}",
            column_join="<|tile_x_separator|>",
            row_join="<|tile_y_separator|>",
            tiles_end="<|tile_y_separator|>",
            whole="<|image|>{tokens}",
        ),
    },
    only={
        "tower.projector_output_dim": lambda at: at.projector_size,
        "tower.vision_output_dim": lambda at: at.projector_size,
        "processor.resize_to_max_canvas": False,
    },
    refuse={
        "tower: intermediate_size {at.intermediate_size} is not that of {at.merge} "
        "x {at.merge} patches": lambda at: at.intermediate_size != merged_width(at),
        "tower: heads of {at.head_dim} numbers are no multiple of 4": lambda at: at.head_dim % 4,
        **OTHER_SIZES,
        **ODD_TILES,
    },
)


def _marks(at: FieldReader, name: str) -> tuple[str, str]:
    """Return the texts before and after an image, a slice or a number."""
    return (
        at.files.token_text(f"{name}_start_token", f"<{name}>"),
        at.files.token_text(f"{name}_end_token", f"</{name}>"),
    )


MINICPMV: Final = SIGLIP.but(
    "MiniCPM-V",
    {
        "window_merger": "vision_tower.vit_merger",
        "projector": ("merger.mlp.0.pre_norm", "merger.mlp.0.linear_1", "merger.mlp.0.linear_2"),
    },
    only={
        "merger_times": 1,
        "drop_vision_last_layer": False,
        "processor.downsample_mode": lambda at: at.mode,
        "processor.patch_size": lambda at: at.patch_size,
    },
    refuse={
        "config: downsample_mode {at.mode!r} is not supported, only '4x' or '16x'": lambda at: (
            at.mode not in {"4x", "16x"}
        ),
        "config: insert_layer_id {at.window_layer} must be one of {at.stored_layers} layers, "
        "squares of 2 x 2": lambda at: (
            at.window_layer >= at.stored_layers or at.window_side != 2 or at.merge != 2
        ),
        "processor: scale_resolution {at.tile} is less than {at.unit}, the side of an embedding": lambda at: (
            at.tile < at.unit
        ),
    },
    table="nearest",
    mode=Key("model.downsample_mode", "16x"),
    other_names=lambda at: {"window_merger": ""} if at.mode == "4x" else {},
    window_merge=lambda at: 1 if at.mode == "4x" else at.window_side,
    window_side=Side("window_kernel_size", 2),
    merge=Side("model.merge_kernel_size", 2),
    window_layer=Key("model.insert_layer_id", 6),
    projector="minicpmv",
    projector_size=merged_width,
    projector_bias=True,
    kind="slices",
    tile=Key("scale_resolution", 448, MAX_SIDE),
    **tile_counts(
        1, Key("processor.max_slice_nums", 9, MAX_TILES), Key("processor.slice_mode", default=True)
    ),
    image_token_id=image_token(248056),
    image_text=token_text("image_token", "<|image_pad|>"),
    tile_text=lambda at: TileText(
        tile="{tokens}".join(_marks(at, "slice")),
        row_join="\n",
        whole="{tokens}".join(_marks(at, "image")),
        whole_first=True,
    ),
    numbered=Key("processor.use_image_id", default=True),
    number_marks=lambda at: _marks(at, "image_id") if at.numbered else (),
)
"""MiniCPM-V 4.6: windows of patches become one after a layer, squares of these in the projector."""
MINICPM_OCR: Final = MINICPMV.but(
    "MiniCPM-OCR",
    only={"processor.small_image_upsize": "always"},
    mode=Key("model.downsample_mode", "4x"),
)


_ATOM: Final = "<IMG_ATOM>"
OVIS2: Final = VisionFamily(
    name="Ovis2",
    names=TowerNames(
        patch="vision_tower.transformer.embeddings.patch_embedding",
        embedded_norm="vision_tower.transformer.embeddings.rms_norm",
        layers="vision_tower.transformer.encoder.layers",
        table="vision_tower.transformer.embeddings.position_embedding.weight",
        post_norm="vision_tower.transformer.rms_norm",
        norms=("rms_norm1", "rms_norm2"),
        qkv=projections("attention"),
        output="attention.out_proj",
        mlp=("ffn.gate_proj", "ffn.up_proj", "ffn.down_proj"),
        projector=("vision_tower.head_norm", "vision_tower.head_linear", "visual_embeddings_table"),
    ),
    rules={
        **sizes(1024, 2816, 24, heads=8),
        "activation": hidden_act("silu"),
        "eps": Key("rms_norm_eps", 1e-5),
        "is_rms": True,
        "attention_bias": Key("qkv_bias", default=False),
        "mlp_bias": Key("mlp_bias", default=False),
        "image_side": Side("image_size", 224),
        "table": "whole",
        "merge": Key("hidden_stride", 1, MAX_TILES),
        "projector": "visual_table",
        "projector_eps": 1e-5,
        "visual_tokens": Key("vocab_size", 16384, MAX_WIDTH),
        "indicators": 5,
        "projector_size": lambda at: at.visual_tokens - at.indicators,
        "kind": "covered_canvas",
        "tile": lambda at: at.image_side,
        **tile_counts(1, PATCH_COUNTS[1], Key("processor.crop_to_patches", default=False)),
        "image_token_id": image_token(151665),
        "placeholder": "<image>",
        "image_text": _ATOM,
        "end": _ATOM,
        "tile_text": TileText(
            tile="{tokens}",
            column_join=_ATOM,
            row_join=_ATOM,
            whole=f"{_ATOM}{{tokens}}{_ATOM}",
            whole_first=True,
            joins_are_rows=True,
        ),
    },
    only={
        "tower.tokenize_function": "softmax",
        "tower.num_visual_indicator_tokens": 5,
        "processor.use_covering_area_grid": True,
    },
    refuse={
        "tower: vocab_size {at.visual_tokens} leaves no visual token": lambda at: at.projector_size < 1,
        **OTHER_SIZES,
        **ODD_TILES,
    },
)
"""Ovis2: patches become shares of visual tokens, whose embeddings are in a table."""
