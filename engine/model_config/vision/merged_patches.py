"""Families whose projectors read squares of patches that stand next to each other: Qwen, GLM and others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ..fields import MAX_WIDTH
from .config import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    LINEARS,
    MAX_SIDE,
    ImageProcessorConfig,
    ResizeKind,
    TowerConfig,
    TowerNames,
    VisionConfig,
)
from .fields import MAX_PIXELS, VisionFields, VisionFiles

_QWEN_NAMES: Final = {"patch": "visual.patch_embed.proj", "layers": "visual.blocks", "stacked": "attn.qkv"}
_MERGER: Final = tuple(f"visual.merger.{name}" for name in ("ln_q", "mlp.0", "mlp.2"))
_GATED: Final = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_DEPTH: Final = ("depth", "num_heads")


def _qwen(
    files: VisionFiles,
    family: str,
    tower: TowerConfig,
    mrope: Mapping[str, Any],
    defaults: tuple[int, int, int],
    mark: str = "<|image_pad|>",
    kind: ResizeKind = "pixels",
) -> VisionConfig:
    """Build the config of a family with merged patches. `defaults`: id of the image token, least and most
    pixels.
    """
    rules, unit = files.processor, tower.patch_size * tower.merge
    kinds = {"patch_size": tower.patch_size, "merge_size": tower.merge, "temporal_patch_size": tower.frames}
    for key, value in kinds.items():
        if rules.integer(key, value) != value:
            raise rules.error(f"{key} {rules.raw[key]} is not that of the tower, {value}")
    least = rules.size("size", ("shortest_edge", "min_pixels"), defaults[1], MAX_PIXELS)
    most = rules.size("size", ("longest_edge", "max_pixels"), defaults[2], MAX_PIXELS)
    least = rules.integer("min_pixels", least, most=MAX_PIXELS)
    most = rules.integer("max_pixels", most, most=MAX_PIXELS)
    if most < max(least, unit**2):
        raise rules.error(f"at most {most} pixels an image are fewer than {max(least, unit**2)}")
    processor = ImageProcessorConfig(
        kind="glm" if tower.projector == "glm" else kind,
        unit=unit,
        least=least,
        most=most,
        **files.pixels(CLIP_MEAN, CLIP_STD, 3),
    )
    out = files.tower.integer(
        "hidden_size" if family == "Qwen2-VL" else "out_hidden_size", files.hidden_size, most=MAX_WIDTH
    )
    if out != files.hidden_size:
        raise files.tower.error(f"embeddings of {out} numbers are not those of the language model")
    return files.config(
        tower,
        processor,
        family=family,
        image_token_id=files.image_token(defaults[0], "image_token_id"),
        placeholder=mark,
        image_text=mark,
        **mrope,
    )


def qwen2_vl(files: VisionFiles) -> VisionConfig:
    fields = files.tower
    sizes = fields.sizes(width=1280, inner=1, layers=32, keys=("embed_dim", *_DEPTH))
    tower = TowerConfig(
        **sizes | {"intermediate_size": int(sizes["hidden_size"] * fields.number("mlp_ratio", 4))},
        names=TowerNames(**_QWEN_NAMES, projector=_MERGER),
        frames=fields.integer("temporal_patch_size", 2, most=16),
        activation=fields.activation("quick_gelu"),
        patch_bias=False,
        rope="axial",
        rope_theta=fields.rope_theta(),
        merge=fields.integer("spatial_merge_size", 2, most=64),
        projector="merger",
    )
    mrope = files.mrope((16, 24, 24), interleaved=False)
    return _qwen(files, "Qwen2-VL", tower, mrope, (151655, 56 * 56, 28 * 28 * 1280))


def qwen2_5_vl(files: VisionFiles) -> VisionConfig:
    mrope = files.mrope((16, 24, 24), interleaved=False)
    return _qwen(files, "Qwen2.5-VL", _windowed_tower(files), mrope, (151655, 56 * 56, 28 * 28 * 1280))


def exaone4_5(files: VisionFiles) -> VisionConfig:
    """Read EXAONE 4.5: the tower of Qwen2.5-VL, whose heads share keys and values, and no M-RoPE."""
    tower = _windowed_tower(files)
    kv_heads = files.tower.integer("num_key_value_heads", 8, most=tower.num_heads)
    if tower.num_heads % kv_heads:
        raise files.tower.error(f"{tower.num_heads} heads cannot share {kv_heads} of keys")
    mark = files.token_text("image_token", "<|image_pad|>")
    tower = replace(tower, kv_heads=kv_heads)
    return _qwen(files, "EXAONE 4.5", tower, {}, (67, 56 * 56, 28 * 28 * 1280), mark)


def _windowed_tower(files: VisionFiles) -> TowerConfig:
    fields = files.tower
    sizes = fields.sizes(width=3584, inner=3420, layers=32, keys=("hidden_size", *_DEPTH))
    merge = fields.integer("spatial_merge_size", 2, most=64)
    full = fields.numbers("fullatt_block_indexes") or (7, 15, 23, 31)
    return TowerConfig(
        **sizes,
        names=TowerNames(**_QWEN_NAMES, **_GATED, projector=_MERGER),
        frames=fields.integer("temporal_patch_size", 2, most=16),
        activation=fields.activation("silu"),
        is_rms=True,
        patch_bias=False,
        rope="axial",
        rope_theta=fields.rope_theta(),
        windows=max(1, fields.integer("window_size", 112, most=MAX_SIDE) // merge // sizes["patch_size"]),
        full_layers=tuple(map(int, full)),
        merge=merge,
        projector="merger",
    )


def qwen3_vl(files: VisionFiles) -> VisionConfig:
    return _qwen3(files, "Qwen3-VL", (24, 20, 20), 151655)


def qwen3_5(files: VisionFiles) -> VisionConfig:
    return _qwen3(files, "Qwen3.5", (11, 11, 10), 248056)


def _qwen3(files: VisionFiles, family: str, sections: tuple[int, ...], token: int) -> VisionConfig:
    fields = files.tower
    sizes = fields.sizes(width=1152, inner=4304, layers=27, patch=16, keys=("hidden_size", *_DEPTH))
    key = "deepstack_visual_indexes"
    deepstack: tuple[int, ...] = ()
    if family == "Qwen3-VL":
        levels = (8, 16, 24) if fields.raw.get(key) is None else fields.numbers(key)
        deepstack = tuple(int(each) for each in levels)
        is_known = all(0 <= level < sizes["num_layers"] for level in deepstack)
        if not is_known or len(set(deepstack)) < len(deepstack):
            raise fields.error(f"{key} {list(deepstack)} must be different layers of {sizes['num_layers']}")
    tower = TowerConfig(
        **sizes,
        names=TowerNames(
            **_QWEN_NAMES,
            table="visual.pos_embed.weight",
            up="mlp.linear_fc1",
            down="mlp.linear_fc2",
            projector=tuple(f"visual.merger.{name}" for name in ("norm", "linear_fc1", "linear_fc2")),
        ),
        frames=fields.integer("temporal_patch_size", 2, most=16),
        activation=fields.activation("gelu_pytorch_tanh"),
        table="bilinear",
        table_rows=fields.integer("num_position_embeddings", 2304, most=MAX_WIDTH),
        rope="axial",
        rope_theta=fields.rope_theta(),
        merge=fields.integer("spatial_merge_size", 2, most=64),
        projector="merger",
        deepstack=deepstack,
    )
    mrope = files.mrope(sections, interleaved=True)
    return _qwen(files, family, tower, mrope, (token, 65536, 16777216))


_GLM_MERGER: Final = ("visual.merger.post_projection_norm", "visual.merger.proj", "visual.downsample")


def glm_ocr(files: VisionFiles) -> VisionConfig:
    bias = files.tower.flag("attention_bias", default=True)
    sizes = files.tower.sizes(width=1024, inner=4096, layers=24, keys=("hidden_size", *_DEPTH))
    norms = {"query_norm": "attn.q_norm", "key_norm": "attn.k_norm"}
    own = {"attention_bias": bias, "mlp_bias": bias, "projector_size": 3 * files.hidden_size}
    return _glm(files, "GLM-OCR", 59280, norms, **sizes, **own)


def glm4v(files: VisionFiles) -> VisionConfig:
    """Read GLM-4.1V and later: layers are as wide inside as the language model, the merger as files say."""
    fields = files.tower
    sizes = fields.sizes(width=1536, inner=13696, layers=24, heads=12, keys=("hidden_size", *_DEPTH))
    names = {"embedded_norm": "visual.post_conv_layernorm"}
    names["table"] = "visual.embeddings.position_embedding.weight"
    own = {
        "projector_size": sizes.pop("intermediate_size"),
        "intermediate_size": files.hidden_size,
        "attention_bias": fields.flag("attention_bias", default=False),
        "output_bias": False,
        "mlp_bias": False,
        "table": "bicubic",
        "table_rows": (fields.side("image_size", 336) // sizes["patch_size"]) ** 2,
    }
    token = 151363 if files.model.raw.get("model_type") == "glm4v_moe" else 151343
    return _glm(files, "GLM-4V", token, names, **sizes, **own)


def _glm(
    files: VisionFiles, family: str, token: int, names: Mapping[str, str], **options: Any
) -> VisionConfig:
    fields = files.tower
    activation = fields.activation("silu")
    tower = TowerConfig(
        **options,
        names=TowerNames(
            **_QWEN_NAMES, **_GATED, **names, post_norm="visual.post_layernorm", projector=_GLM_MERGER
        ),
        frames=fields.side("temporal_patch_size", 2),
        activation=activation,
        eps=fields.number("rms_norm_eps", 1e-5),
        is_rms=True,
        rope="axial",
        rope_theta=fields.rope_theta(),
        merge=fields.integer("spatial_merge_size", 2, most=64),
        projector="glm",
        projector_eps=1e-5,
        projector_activation=activation,
    )
    mrope = files.mrope((8, 12, 12), interleaved=False) | {"mrope_interleaved": False}
    mark = files.token_text("image_token", "<|image|>")
    return _qwen(files, family, tower, mrope, (token, 112 * 112, 28 * 28 * 15000), mark)


def lfm3_vl(files: VisionFiles) -> VisionConfig:
    fields, model = files.tower, files.model
    sizes = fields.sizes(width=1024, inner=2560, layers=14, patch=16)
    layers, heads = sizes["num_layers"], sizes["num_heads"]
    kv_heads = fields.integer("num_key_value_heads", 8, most=heads)
    if heads % kv_heads or sizes["head_dim"] % 4:
        raise fields.error(f"{heads} heads of {sizes['head_dim']} cannot share {kv_heads} of keys")
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        kinds = ["conv" if layer < 2 or layer % 2 else "full_attention" for layer in range(layers)]
    known = isinstance(kinds, list) and all(kind in ("conv", "full_attention") for kind in kinds)
    if not known or len(kinds) != layers:
        raise fields.error(f"layer_types must name conv or full_attention for each of {layers} layers")
    width = fields.integer("conv_kernel_size", 3, most=31)
    if width % 2 == 0:
        raise fields.error(f"conv_kernel_size {width} is not supported, only odd numbers")
    names = TowerNames(
        patch="vision_tower.patchifier",
        embedded_norm="vision_tower.embedding_norm",
        layers="vision_tower.layers",
        norm1="operator_norm",
        norm2="ffn_norm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.out_proj",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        conv="conv",
        projector=tuple(f"multi_modal_projector.{name}" for name in ("layer_norm", "linear_1", "linear_2")),
    )
    tower = TowerConfig(
        **sizes,
        names=names,
        kv_heads=kv_heads,
        frames=fields.side("temporal_patch_size", 2),
        activation="silu",
        eps=fields.number("norm_eps", 1e-5),
        is_rms=True,
        attention_bias=False,
        mlp_bias=False,
        patch_bias=False,
        rope="axial",
        rope_theta=fields.rope_theta(1e6),
        conv_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        conv_width=width,
        merge=fields.integer("spatial_merge_size", 2, most=64),
        projector="lfm3_vl",
        projector_size=model.integer("projector_hidden_size", 4096, most=MAX_WIDTH),
        projector_bias=model.flag("projector_bias", default=True),
        projector_activation=model.activation("gelu", "projector_hidden_act"),
    )
    mark = files.token_text("image_token", "<|image_pad|>")
    return _qwen(files, "LFM3-VL", tower, {}, (125030, 56 * 56, 28 * 28 * 1280), mark)


def paddleocr_vl(files: VisionFiles) -> VisionConfig:
    """Read PaddleOCR-VL: SigLIP with RoPE, and positions that images of any size share."""
    fields = files.tower
    sizes = fields.sizes(width=1152, inner=4304, layers=27)
    merge = fields.integer("spatial_merge_size", 2, most=64)
    tower = TowerConfig(
        **sizes,
        names=TowerNames.siglip(
            "visual.vision_model.", *(f"mlp_AR.{name}" for name in ("pre_norm", "linear_1", "linear_2"))
        ),
        activation=fields.activation("gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6),
        table="bilinear_edges",
        table_rows=(fields.side("image_size", 384) // sizes["patch_size"]) ** 2,
        rope="axial",
        rope_theta=fields.rope_theta(),
        merge=merge,
        projector="lfm3_vl",
        projector_size=sizes["hidden_size"] * merge**2,
        projector_bias=True,
        projector_eps=1e-5,
    )
    mrope = files.mrope((16, 24, 24), interleaved=False)
    mark = files.token_text("image_token", "<|IMAGE_PLACEHOLDER|>")
    limits = 100295, 384 * 384, 1536 * 1536
    return _qwen(files, "PaddleOCR-VL", tower, mrope, limits, mark, "whole_units")


def kimi_k25(files: VisionFiles) -> VisionConfig:
    """Read Kimi K2.5, whose files are in its own spelling or that of transformers."""
    # Their own keys are vt_hidden_size, init_pos_emb_height and so on.
    own = {key.removeprefix("vt_").removeprefix("init_"): each for key, each in files.tower.raw.items()}
    fields, model = VisionFields(own, files.tower.where), files.model
    sizes = fields.sizes(width=1152, inner=4304, layers=27)
    hidden, patch, merge = sizes["hidden_size"], sizes["patch_size"], fields.side("merge_kernel_size", 2)
    side, at, mm = fields.integer("pos_emb_height", 64, most=MAX_SIDE), "vision_tower.", "mm_projector."
    if fields.integer("pos_emb_width", side) != side or sizes["head_dim"] % 4:
        raise fields.error("only a square of positions, and heads of a multiple of 4 numbers, are supported")
    if model.integer("projection_hidden_size", hidden) != hidden:
        raise model.error(f"projection_hidden_size is not that of the tower, {hidden}")
    names = TowerNames(
        patch=f"{at}patch_embed.proj",
        layers=f"{at}encoder.blocks",
        table=f"{at}patch_embed.pos_emb.weight",
        post_norm=f"{at}encoder.final_layernorm",
        norm1="norm0",
        norm2="norm1",
        stacked="wqkv",
        output="wo",
        up="mlp.fc0",
        down="mlp.fc1",
        projector=(f"{mm}pre_norm", f"{mm}proj.0", f"{mm}proj.2"),
    )
    tower = TowerConfig(
        **sizes,
        names=names,
        activation=fields.activation("gelu_pytorch_tanh"),
        eps=1e-5,
        table="bicubic_square",
        table_rows=side * side,
        rope="alternating_pairs",
        rope_theta=fields.rope_theta(),
        merge=merge,
        projector="lfm3_vl",
        projector_size=hidden * merge**2,
        projector_bias=True,
        projector_eps=model.number("projection_layer_norm_eps", fields.number("projector_ln_eps", 1e-5)),
    )
    files = replace(files, processor=_kimi_rules(files.processor))
    rules, mark = files.processor, files.token_text("image_token", "<|media_pad|>")
    if rules.integer("patch_size", patch) != patch or rules.side("merge_size", merge) != merge:
        raise rules.error(f"patch_size and merge_size are not those of the tower, {patch} and {merge}")
    if not rules.flag("pad_input", default=True):
        raise rules.error("pad_input false is not supported")
    processor = ImageProcessorConfig(
        kind="padded_units",
        unit=patch * merge,
        patch=patch,
        most=rules.integer("max_patches", 16384, most=MAX_PIXELS) * patch**2,
        longest=patch * rules.size("size", ("max_height",), 512, MAX_SIDE),
        **files.pixels(HALF, HALF, 3),
    )
    return files.config(
        tower,
        processor,
        family="Kimi K2.5",
        image_token_id=files.image_token(163605, "image_token_id", "media_placeholder_token_id"),
        placeholder=mark,
        image_text=mark,
    )


def kimi_vl(files: VisionFiles) -> VisionConfig:
    """Read Kimi-VL: that of Kimi K2.5 with other names in its projector."""
    rules = VisionFields({"in_token_limit": 4096, **files.processor.raw}, files.processor.where)
    found = kimi_k25(replace(files, processor=rules))
    projector = ("multi_modal_projector.pre_norm", *LINEARS)
    tower = replace(found.tower, names=replace(found.tower.names, projector=projector))
    return replace(found, family="Kimi-VL", tower=tower)


def _kimi_rules(rules: VisionFields) -> VisionFields:
    """Return the rules of the image processor in the spelling of transformers."""
    own = rules.mapping("media_proc_cfg") or rules.raw
    keys = {"in_patch_limit": "max_patches", "in_token_limit": "max_patches"}
    keys["merge_kernel_size"] = "merge_size"
    raw = {keys.get(key, key): value for key, value in own.items()}
    if (side := raw.get("patch_limit_on_one_side")) is not None:
        raw["size"] = {"max_height": side}
    return VisionFields(raw, rules.where)
