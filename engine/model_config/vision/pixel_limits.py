"""Families whose images keep their shape within limits of pixels, with squares: Qwen, GLM."""

from typing import Any, Final

from ..fields import MAX_WIDTH
from .config import HALF, LINEARS, MAX_SIDE, TowerNames, projections, siglip_names
from .fields import (
    MAX_PIXELS,
    MAX_TILES,
    FieldReader,
    Key,
    Side,
    VisionFamily,
    VisionFields,
    hidden_act,
    hidden_size_of_text,
    image_token,
    merged_width,
    sizes,
    token_text,
)


def refuse_other_patches(at: FieldReader) -> None:
    """Refuse an image processor of other patches than those of the tower."""
    sides = {"patch_size": at.patch_size, "merge_size|merge_kernel_size": at.merge}
    for paths, value in {**sides, "temporal_patch_size": at.frames}.items():
        rules, key = at.files.find(paths, "processor")
        if value and rules.side(key, value) != value:
            raise rules.error(f"{key} {rules.raw[key]} is not that of the tower, {value}")


def _check_limits(at: FieldReader) -> None:
    if at.most < (least := max(at.least, at.unit**2)):
        raise at.processor.error(f"at most {at.most} pixels an image are fewer than {least}")
    if at.out_size != at.files.hidden_size:
        raise at.tower.error(f"embeddings of {at.out_size} numbers are not those of the language model")


def _pixel_limits(least: int, most: int) -> dict[str, Any]:
    return {
        "least": Key("min_pixels|size.shortest_edge|size.min_pixels", least, MAX_PIXELS),
        "most": Key("max_pixels|size.longest_edge|size.max_pixels", most, MAX_PIXELS),
    }


def mrope(*sections: int, interleaved: bool) -> dict[str, Any]:
    """Return the keys of M-RoPE, with their defaults."""

    def read_sections(at: FieldReader) -> tuple[int, ...]:
        found: tuple[int, ...] = Key("rope.mrope_section", sections).read(at, "rope")
        if len(found) != 3 or min(found) < 0:
            raise at.files.text.error(f"mrope_section {found} must have three numbers")
        return found

    return {
        "mrope_section": read_sections,
        "mrope_interleaved": Key("rope.mrope_interleaved", interleaved),
    }


def mrope_of_types(at: FieldReader) -> tuple[int, ...]:
    """Return the sections that all types of layers with RoPE have. Raises ModelError where they differ."""
    by_type = at.files.rope
    ropes = [VisionFields(one, by_type.where) for one in by_type.raw.values() if isinstance(one, dict)]
    found = {tuple(map(int, one.numbers("mrope_section"))) or (24, 20, 20) for one in ropes}
    sections = next(iter(found), ())
    if len(found) != 1 or len(sections) != 3 or min(sections) < 0:
        raise by_type.error("mrope_section must have three numbers, the same for all types of layers")
    return sections


_QWEN: Final = VisionFamily(
    name="Qwen",
    names=TowerNames(
        patch="visual.patch_embed.proj",
        layers="visual.blocks",
        projector=("visual.merger.ln_q", "visual.merger.mlp.0", "visual.merger.mlp.2"),
    ),
    rules={
        "frames": Side("temporal_patch_size", 2, 16),
        "eps": 1e-6,
        "rope": "axial",
        "merge": Key("spatial_merge_size", 2, MAX_TILES),
        "projector": "merger",
        "projector_size": merged_width,
        "projector_bias": True,
        "kind": "pixels",
        **_pixel_limits(56 * 56, 28 * 28 * 1280),
        "image_token_id": image_token(151655),
        "image_text": "<|image_pad|>",
        "out_size": Key("out_hidden_size", hidden_size_of_text, MAX_WIDTH),
    },
    checks=(refuse_other_patches, _check_limits),
)
QWEN2_VL: Final = _QWEN.but(
    "Qwen2-VL",
    **sizes(
        *(1280, 1, 32),
        hidden_size=Key("embed_dim", 1280, MAX_WIDTH),
        intermediate_size=lambda at: int(at.hidden_size * at.mlp_ratio),
    ),
    mlp_ratio=Key("mlp_ratio", 4.0),
    activation=hidden_act("quick_gelu"),
    patch_bias=False,
    out_size=Key("hidden_size", hidden_size_of_text, MAX_WIDTH),
    **mrope(16, 24, 24, interleaved=False),
)


def _full_layers(at: FieldReader) -> tuple[int, ...]:
    return tuple(map(int, at.tower.numbers("fullatt_block_indexes"))) or (7, 15, 23, 31)


_GATED: Final = {"mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
_WINDOWED: Final = _QWEN.but(
    "Qwen2.5-VL",
    _GATED,
    **sizes(3584, 3420, 32),
    activation=hidden_act("silu"),
    is_rms=True,
    patch_bias=False,
    window_size=Key("window_size", 112, MAX_SIDE),
    windows=lambda at: max(1, at.window_size // at.merge // at.patch_size),
    full_layers=_full_layers,
)
QWEN2_5_VL: Final = _WINDOWED.but("Qwen2.5-VL", **mrope(16, 24, 24, interleaved=False))


QWEN2_5_OMNI: Final = QWEN2_5_VL.but(
    "Qwen2.5-Omni",
    {"qkv": ("attn.q", "attn.k", "attn.v")},
    image_text=token_text("image_token", "<|IMAGE|>"),
)
EXAONE4_5: Final = _WINDOWED.but(
    "EXAONE 4.5",
    refuse={
        "tower: {at.num_heads} heads cannot share {at.kv_heads} of keys": lambda at: (
            at.num_heads % at.kv_heads
        )
    },
    kv_heads=Key("num_key_value_heads", 8, MAX_WIDTH),
    image_token_id=image_token(67),
    image_text=token_text("image_token", "<|image_pad|>"),
)
HYPERCLOVAX: Final = _WINDOWED.but(
    "HyperCLOVA X Vision",
    {
        "patch": "vision_model.patch_embed.proj",
        "layers": "vision_model.blocks",
        "projector": (
            *(f"vision_model.merger.{part}" for part in ("ln_q", "mlp.0", "mlp.2")),
            "vision_projector",
        ),
    },
    image_token_id=image_token(128060),
    image_text=token_text("image_token", "<|image_pad|>"),
    merger_size=Key("out_hidden_size", 3584, MAX_WIDTH),
    out_size=hidden_size_of_text,
)
QWEN3_5: Final = _QWEN.but(
    "Qwen3.5",
    {
        "table": "visual.pos_embed.weight",
        "mlp": ("mlp.linear_fc1", "mlp.linear_fc2"),
        "projector": ("visual.merger.norm", "visual.merger.linear_fc1", "visual.merger.linear_fc2"),
    },
    **sizes(1152, 4304, 27, patch=16),
    activation=hidden_act("gelu_pytorch_tanh"),
    table="bilinear",
    table_rows=Key("num_position_embeddings", 2304, MAX_WIDTH),
    **_pixel_limits(65536, 16777216),
    image_token_id=image_token(248056),
    **mrope(11, 11, 10, interleaved=True),
)


def _deepstack(at: FieldReader) -> tuple[int, ...]:
    fields, key = at.tower, "deepstack_visual_indexes"
    levels = (8, 16, 24) if fields.raw.get(key) is None else tuple(map(int, fields.numbers(key)))
    is_known = all(0 <= level < at.num_layers for level in levels)
    if not is_known or len(set(levels)) < len(levels):
        raise fields.error(f"{key} {list(levels)} must be different layers of {at.num_layers}")
    return levels


QWEN3_VL: Final = QWEN3_5.but(
    "Qwen3-VL",
    deepstack=_deepstack,
    image_token_id=image_token(151655),
    **mrope(24, 20, 20, interleaved=True),
)
COHERE_COMPASS: Final = QWEN3_VL.but(
    "Cohere Compass",
    image_token_id=image_token(255031),
    mrope_section=mrope_of_types,
    mrope_interleaved=True,
    image_text=token_text("image_token", "<|IMAGE_PAD|>"),
)
QWEN3_OMNI: Final = QWEN3_VL.but(
    "Qwen3-Omni",
    {"projector": _QWEN.names.projector, "deepstack": "visual.merger_list"},
    image_text=token_text("image_token", "<|image_pad|>"),
)
VIDEO_LLAMA3: Final = _QWEN.but(
    "VideoLLaMA 3",
    siglip_names("vision_model.", "", "projector.readout.0", "projector.readout.2"),
    only={"processor.merge_size": 1},
    **sizes(768, 3072, 12, heads=12, patch=16),
    frames=1,
    activation=hidden_act("gelu_pytorch_tanh"),
    eps=Key("layer_norm_eps", 1e-6),
    merge=1,
    projector="llava",
    projector_size=hidden_size_of_text,
    projector_activation="gelu",
    usual_pixels=(HALF, HALF, 3),
    out_size=hidden_size_of_text,
    image_text=token_text("image_token", "<image>"),
)
GLM_OCR: Final = _QWEN.but(
    "GLM-OCR",
    {
        **_GATED,
        "qk_norms": ("attn.q_norm", "attn.k_norm"),
        "post_norm": "visual.post_layernorm",
        "projector": ("visual.merger.post_projection_norm", "visual.merger.proj", "visual.downsample"),
    },
    **sizes(1024, 4096, 24),
    attention_bias=Key("attention_bias", default=True),
    mlp_bias=lambda at: at.attention_bias,
    activation=hidden_act("silu"),
    eps=Key("rms_norm_eps", 1e-5),
    is_rms=True,
    projector="glm",
    projector_size=lambda at: 3 * at.files.hidden_size,
    projector_eps=1e-5,
    projector_activation=lambda at: at.activation,
    kind="glm",
    **_pixel_limits(112 * 112, 28 * 28 * 15000),
    image_token_id=image_token(59280),
    image_text=token_text("image_token", "<|image|>"),
    **mrope(8, 12, 12, interleaved=False) | {"mrope_interleaved": False},
)
GLM4V: Final = GLM_OCR.but(
    "GLM-4V",
    {
        "qk_norms": (),
        "embedded_norm": "visual.post_conv_layernorm",
        "table": "visual.embeddings.position_embedding.weight",
    },
    **sizes(1536, 0, 24, heads=12, intermediate_size=hidden_size_of_text),
    attention_bias=Key("attention_bias", default=False),
    output_bias=False,
    mlp_bias=False,
    table="bicubic",
    image_side=Side("image_size", 336),
    projector_size=Key("tower.intermediate_size", 13696, 16 * MAX_WIDTH),
    image_token_id=image_token(151343),
)
GLMGA: Final = GLM4V.but("GLM-4V", only={"processor.patch_expand_factor": 1})
GLM4V_MOE: Final = GLM4V.but("GLM-4V", image_token_id=image_token(151363))
"""GLM-4.1V and later: layers are as wide inside as the language model, the merger as files say."""


def _conv_layers(at: FieldReader) -> tuple[int, ...]:
    layers, fields = at.num_layers, at.tower
    usual = ["conv" if layer < 2 or layer % 2 else "full_attention" for layer in range(layers)]
    value = usual if fields.raw.get("layer_types") is None else fields.raw["layer_types"]
    kinds = fields.layer_types(value, layers, "conv", "full_attention")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")


LFM3_VL: Final = _QWEN.but(
    "LFM3-VL",
    TowerNames(
        patch="vision_tower.patchifier",
        embedded_norm="vision_tower.embedding_norm",
        layers="vision_tower.layers",
        norms=("operator_norm", "ffn_norm"),
        qkv=projections("self_attn"),
        output="self_attn.out_proj",
        qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
        conv="conv",
        projector=("multi_modal_projector.layer_norm", *LINEARS),
    ),
    refuse={
        "tower: {at.num_heads} heads of {at.head_dim} cannot share {at.kv_heads} of keys": lambda at: (
            at.num_heads % at.kv_heads or at.head_dim % 4
        ),
        "tower: conv_kernel_size {at.conv_width} is not supported, only odd numbers": lambda at: (
            at.conv_width % 2 == 0
        ),
    },
    **sizes(1024, 2560, 14, patch=16),
    kv_heads=Key("num_key_value_heads", 8, MAX_WIDTH),
    activation="silu",
    eps=Key("norm_eps", 1e-5),
    is_rms=True,
    attention_bias=False,
    mlp_bias=False,
    patch_bias=False,
    usual_theta=1e6,
    conv_layers=_conv_layers,
    conv_width=Key("conv_kernel_size", 3, 31),
    projector="lfm3_vl",
    projector_size=Key("model.projector_hidden_size", 4096, MAX_WIDTH),
    projector_bias=Key("model.projector_bias", default=True),
    image_token_id=image_token(125030),
    image_text=token_text("image_token", "<|image_pad|>"),
)
PADDLEOCR_VL: Final = _QWEN.but(
    "PaddleOCR-VL",
    siglip_names("visual.vision_model.", "mlp_AR.pre_norm", "mlp_AR.linear_1", "mlp_AR.linear_2"),
    **sizes(1152, 4304, 27),
    frames=1,
    activation=hidden_act("gelu_pytorch_tanh"),
    eps=Key("layer_norm_eps", 1e-6),
    table="bilinear_edges",
    image_side=Side("image_size", 384),
    projector="lfm3_vl",
    projector_size=merged_width,
    projector_bias=True,
    projector_eps=1e-5,
    kind="whole_units",
    **_pixel_limits(384 * 384, 1536 * 1536),
    image_token_id=image_token(100295),
    image_text=token_text("image_token", "<|IMAGE_PLACEHOLDER|>"),
    **mrope(16, 24, 24, interleaved=False),
)
"""SigLIP with RoPE, and positions that images of any size share."""
