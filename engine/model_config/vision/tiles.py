"""Families that cut large images into tiles: Idefics3, InternVL, Qianfan-OCR, Llama 4, LFM2-VL, MiniCPM-V."""

from dataclasses import replace
from typing import Final

from ..fields import MAX_WIDTH, show
from .config import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    LINEARS,
    MAX_SIDE,
    ImageProcessorConfig,
    TowerConfig,
    TowerNames,
    VisionConfig,
)
from .fields import VisionFields, VisionFiles


def idefics3(files: VisionFiles) -> VisionConfig:
    fields, model = files.tower, files.model
    sizes = fields.sizes(width=1152, inner=3072, layers=12, patch=32)
    side = fields.side("image_size", 224) // sizes["patch_size"]
    merge = model.integer("scale_factor", 2, most=64)
    tower = TowerConfig(
        **sizes,
        names=TowerNames.siglip("vision_model.", "", "connector.modality_projection.proj", ""),
        activation=fields.activation("gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6),
        table="buckets",
        table_rows=side * side,
        merge=merge,
        projector="pixel_shuffle",
    )
    rules, unit = files.processor, tower.patch_size * merge
    tile = rules.size("max_image_size", ("longest_edge",), 364, MAX_SIDE)
    if not tile // tower.patch_size or tile // tower.patch_size % merge:
        raise rules.error(f"max_image_size {tile} has no whole squares of {merge} x {merge} patches")
    processor = ImageProcessorConfig(
        kind="tiles",
        unit=unit,
        longest=rules.size("size", ("longest_edge",), 4 * 364, MAX_SIDE),
        tile=tile,
        splits=rules.flag("do_image_splitting", default=True),
        **files.pixels(HALF, HALF, 1),
    )
    return files.config(
        tower,
        processor,
        family="SmolVLM, Idefics3",
        image_token_id=files.image_token(128257, "image_token_id"),
        placeholder="<image>",
        image_text="<image>",
        start="<fake_token_around_image>",
    )


def lfm2_vl(files: VisionFiles) -> VisionConfig:
    fields, model, rules = files.tower, files.model, files.processor
    sizes = fields.sizes(width=768, inner=3072, layers=12, heads=12, patch=16)
    merge = model.integer("downsample_factor", 2, most=64)
    tower = TowerConfig(
        **sizes,
        names=TowerNames.siglip("vision_tower.", "multi_modal_projector.layer_norm", *LINEARS),
        channels_last=True,
        activation=fields.activation("gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6),
        table="antialiased",
        table_rows=fields.integer("num_patches", 256, most=MAX_WIDTH),
        merge=merge,
        projector="pixel_shuffle_mlp",
        projector_size=model.integer("projector_hidden_size", 2560, most=MAX_WIDTH),
        projector_bias=model.flag("projector_bias", default=True),
        projector_norm=model.flag("projector_use_layernorm", default=True),
        projector_eps=1e-5,
        projector_activation=model.activation("gelu", "projector_hidden_act"),
    )
    if files.feature_layer(tower.num_layers) != tower.num_layers:
        raise model.error("vision_feature_layer is not supported, only the last layer")
    unit = tower.patch_size * merge
    tile = rules.integer("tile_size", 512, most=MAX_SIDE)
    if tile % unit or rules.integer("encoder_patch_size", tower.patch_size) != tower.patch_size:
        raise rules.error(f"tile_size {tile} or encoder_patch_size is not of patches of {tower.patch_size}")
    counts = rules.integer("min_tiles", 2, most=64), rules.integer("max_tiles", 10, most=64)
    processor = ImageProcessorConfig(
        kind="lfm2",
        unit=unit,
        tile=tile,
        splits=rules.flag("do_image_splitting", default=True) and counts != (1, 1),
        least=rules.integer("min_image_tokens", 64, most=1 << 16) * unit**2,
        most=rules.integer("max_image_tokens", 256, most=1 << 16) * unit**2,
        tile_counts=counts,
        thumbnail=rules.flag("use_thumbnail", default=True),
        tolerance=rules.number("max_pixels_tolerance", 2.0),
        **files.pixels(HALF, HALF, 2),
    )
    return files.config(
        tower,
        processor,
        family="LFM2-VL",
        image_token_id=files.image_token(396, "image_token_id", "image_token_index"),
        placeholder="<image>",
        image_text="<image>",
        start="<|image_start|>",
        end="<|image_end|>",
    )


def internvl(files: VisionFiles) -> VisionConfig:
    fields, model, rules = files.tower, files.model, files.processor
    sizes = fields.sizes(width=1024, inner=4096, layers=24)
    patch, merge = sizes["patch_size"], round(1 / model.number("downsample_ratio", 0.5))
    norm = fields.text("norm_type", "layer_norm")
    if norm not in {"layer_norm", "rms_norm"}:
        raise fields.error(f"norm_type {show(norm)} is not supported, only layer_norm or rms_norm")
    for source, key, usual in (
        (model, "vision_feature_select_strategy", "default"),
        (fields, "use_absolute_position_embeddings", True),
        (fields, "use_mean_pooling", True),
    ):
        if (value := source.raw.get(key, usual)) != usual:
            raise source.error(f"{key} {show(value)} is not supported, only {usual}")
    layers, wide_norms = files.feature_layer(sizes["num_layers"]), fields.flag("use_qk_norm", default=False)
    eps = fields.number("layer_norm_eps", 1e-6)
    if wide_norms and eps != 1e-6:
        raise fields.error(f"layer_norm_eps {eps} is not supported with use_qk_norm, only 1e-6")
    image_side = fields.side("image_size", 448)
    tile = rules.side("size", image_side)
    if not tile // patch or tile // patch % merge:
        raise rules.error(f"size {tile} has no whole squares of {merge} x {merge} patches of {patch} pixels")
    tower = TowerConfig(
        **sizes | {"num_layers": layers},
        names=TowerNames(
            patch="vision_tower.embeddings.patch_embeddings.projection",
            layers="vision_tower.encoder.layer",
            class_embedding="vision_tower.embeddings.cls_token",
            table="vision_tower.embeddings.position_embeddings",
            norm1="layernorm_before",
            norm2="layernorm_after",
            attention_scale="lambda_1",
            mlp_scale="lambda_2",
            query="attention.q_proj",
            key="attention.k_proj",
            value="attention.v_proj",
            output="attention.projection_layer",
            query_norm="attention.q_norm" if wide_norms else "",
            key_norm="attention.k_norm" if wide_norms else "",
            projector=("multi_modal_projector.layer_norm", *LINEARS),
        ),
        activation=fields.activation("gelu"),
        eps=eps,
        is_rms=norm == "rms_norm",
        attention_bias=fields.flag("attention_bias", default=False),
        output_bias=True,
        wide_norms=wide_norms,
        table="bicubic",
        table_rows=(image_side // patch) ** 2,
        merge=merge,
        projector="pixel_shuffle_mlp",
        projector_size=files.hidden_size,
        projector_bias=True,
        projector_eps=1e-5,
        projector_activation=model.activation("gelu", "projector_hidden_act"),
    )
    most = rules.integer("max_patches", 12, most=64)
    processor = ImageProcessorConfig(
        kind="canvas",
        unit=patch * merge,
        tile=tile,
        splits=most > 1,  # its processor asks for tiles whatever `crop_to_patches` of the file says
        tile_counts=(rules.integer("min_patches", 1, most=most), most),
        **files.pixels(CLIP_MEAN, CLIP_STD, 3),
    )
    image = files.token_text("context_image_token", "<IMG_CONTEXT>")
    return files.config(
        tower,
        processor,
        family="InternVL",
        image_token_id=files.image_token(151667, "image_token_id"),
        placeholder=image,
        image_text=image,
        start=files.token_text("start_image_token", "<img>"),
        end=files.token_text("end_image_token", "</img>"),
    )


_OWN_NAMES: Final = TowerNames(
    patch="vision_model.embeddings.patch_embedding",
    layers="vision_model.encoder.layers",
    class_embedding="vision_model.embeddings.class_embedding",
    table="vision_model.embeddings.position_embedding",
    attention_scale="ls1",
    mlp_scale="ls2",
    stacked="attn.qkv",
    projector=("mlp1.0", "mlp1.1", "mlp1.3"),
)
"""Names of InternVL's own checkpoints."""


def internvl_chat(files: VisionFiles) -> VisionConfig:
    """Read an InternVL as its authors publish it: the same model under other keys and names."""
    model, fields, rules = files.model, files.tower, files.processor
    for key, usual in (("ps_version", "v2"), ("use_thumbnail", True)):
        if (value := model.raw.get(key, usual)) != usual:
            raise model.error(f"{key} {show(value)} is not supported, only {show(usual)}")
    sizes = {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48}
    tower = {**sizes, "num_attention_heads": 25, "image_size": 224, "norm_type": "rms_norm", **fields.raw}
    tower["attention_bias"] = fields.flag("qkv_bias", default=False)
    tower["use_qk_norm"] = has_norms = fields.flag("qk_normalization", default=True)
    most = 1
    if model.flag("dynamic_image_size", default=False):
        most = model.integer("max_dynamic_patch", 6, most=64)
    processor = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, **rules.raw}
    processor["size"] = model.integer("force_image_size", int(tower["image_size"]), most=MAX_SIDE)
    processor |= {"min_patches": model.integer("min_dynamic_patch", 1, most=most), "max_patches": most}
    raw = {**model.raw, "vision_feature_layer": model.raw.get("select_layer", -1)}
    found = internvl(
        replace(
            files,
            model=VisionFields(raw, model.where),
            tower=VisionFields(tower, fields.where),
            processor=VisionFields(processor, rules.where),
        )
    )
    norms = ("attn.q_norm", "attn.k_norm") if has_norms else ("", "")
    names = replace(_OWN_NAMES, query_norm=norms[0], key_norm=norms[1])
    return replace(
        found,
        tower=replace(found.tower, names=names),
        image_token_id=files.token_id(found.image_text),
        placeholder="<image>",
    )


def qianfan_ocr(files: VisionFiles) -> VisionConfig:
    """Read Qianfan-OCR: that of InternVL under the names that InternVL's own checkpoints have."""
    if files.tower.flag("use_qk_norm", default=False):
        raise files.tower.error("use_qk_norm true is not supported")
    raw = {"attention_bias": True, **files.tower.raw}
    found = internvl(replace(files, tower=VisionFields(raw, files.tower.where)))
    tower = replace(found.tower, names=_OWN_NAMES)
    return replace(found, family="Qianfan-OCR", placeholder="<image>", tower=tower)


def llama4(files: VisionFiles) -> VisionConfig:
    fields, rules = files.tower, files.processor
    sizes = fields.sizes(width=768, inner=5632, layers=34)
    patch, merge = sizes["patch_size"], round(1 / fields.number("pixel_shuffle_ratio", 0.5))
    merged, width = (
        sizes["hidden_size"] * merge**2,
        fields.integer("projector_input_dim", 4096, most=MAX_WIDTH),
    )
    if sizes["intermediate_size"] != merged:
        raise fields.error(
            f"intermediate_size {sizes['intermediate_size']} is not that of {merge} x {merge} patches"
        )
    for key in ("projector_output_dim", "vision_output_dim"):
        if fields.integer(key, width) != width:
            raise fields.error(f"{key} {fields.raw[key]} is not projector_input_dim {width}")
    if sizes["head_dim"] % 4:
        raise fields.error(f"heads of {sizes['head_dim']} numbers are no multiple of 4")
    if rules.flag("resize_to_max_canvas", default=False):
        raise rules.error("resize_to_max_canvas true is not supported")
    image_side = fields.side("image_size", 448)
    if rules.side("size", image_side) != image_side or image_side // patch % merge:
        raise rules.error(
            f"size must be that of the tower, {image_side}, and of squares of {merge} x {merge} patches"
        )
    at = "vision_model."
    tower = TowerConfig(
        **sizes,
        names=TowerNames(
            patch=f"{at}patch_embedding.linear",
            layers=f"{at}model.layers",
            class_embedding=f"{at}class_embedding",
            table=f"{at}positional_embedding_vlm",
            pre_norm=f"{at}layernorm_pre",
            post_norm=f"{at}layernorm_post",
            norm1="input_layernorm",
            norm2="post_attention_layernorm",
            query="self_attn.q_proj",
            key="self_attn.k_proj",
            value="self_attn.v_proj",
            output="self_attn.o_proj",
            projector=("", f"{at}vision_adapter.mlp.fc1", f"{at}vision_adapter.mlp.fc2", LINEARS[0]),
        ),
        activation="gelu",
        eps=1e-5,
        patch_bias=False,
        table="whole",
        table_rows=(image_side // patch) ** 2,
        class_is_last=True,
        rope="pairs",
        rope_theta=fields.rope_theta(),
        merge=merge,
        projector="llama4",
        projector_size=width,
    )
    most = rules.integer("max_patches", 16, most=64)
    processor = ImageProcessorConfig(
        kind="padded_canvas",
        unit=patch * merge,
        tile=image_side,
        splits=most > 1,
        tile_counts=(1, most),
        **files.pixels(HALF, HALF, 2),
    )
    return files.config(
        tower,
        processor,
        family="Llama 4",
        image_token_id=files.image_token(200092, "image_token_id", "image_token_index"),
        placeholder="<|image|>",
        image_text="<|patch|>",
        start="<|image_start|>",
        end="<|image_end|>",
    )


def minicpmv(files: VisionFiles) -> VisionConfig:
    """Read MiniCPM-V 4.6: windows of patches become one after a layer, squares of these in the projector."""
    fields, model, rules = files.tower, files.model, files.processor
    sizes = fields.sizes(width=768, inner=3072, layers=12, heads=12, patch=16)
    layers, patch = sizes["num_layers"], sizes["patch_size"]
    window, merge = fields.side("window_kernel_size", 2), model.side("merge_kernel_size", 2)
    layer = model.integer("insert_layer_id", 6)
    for source, key, usual in (
        (model, "downsample_mode", "16x"),
        (model, "merger_times", 1),
        (model, "drop_vision_last_layer", False),
        (rules, "downsample_mode", "16x"),
        (rules, "patch_size", patch),
    ):
        if (value := source.raw.get(key, usual)) != usual:
            raise source.error(f"{key} {show(value)} is not supported, only {usual}")
    if layer >= layers or window != 2 or merge != 2:
        raise model.error(f"insert_layer_id {layer} must be one of {layers} layers, and squares of 2 x 2")
    at = "vision_tower."
    merger = tuple(f"merger.mlp.0.{name}" for name in ("pre_norm", "linear_1", "linear_2"))
    tower = TowerConfig(
        **sizes,
        names=replace(TowerNames.siglip(at, *merger), window_merger=f"{at}vit_merger"),
        activation=fields.activation("gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6),
        table="nearest",
        table_rows=(fields.side("image_size", 224) // patch) ** 2,
        merge=merge,
        window_layer=layer,
        window_merge=window,
        projector="minicpmv",
        projector_bias=True,
    )
    tile, unit = rules.integer("scale_resolution", 448, most=MAX_SIDE), patch * merge * window
    if tile < unit:
        raise rules.error(f"scale_resolution {tile} is less than {unit}, the side of an embedding")
    most = rules.integer("max_slice_nums", 9, most=64)
    processor = ImageProcessorConfig(
        kind="slices",
        unit=unit,
        tile=tile,
        splits=rules.flag("slice_mode", default=True) and most > 1,
        tile_counts=(1, most),
        **files.pixels(HALF, HALF, 3),
    )

    def marks(name: str, opening: str, closing: str) -> tuple[str, str]:
        return files.token_text(f"{name}_start_token", opening), files.token_text(
            f"{name}_end_token", closing
        )

    start, end = marks("image", "<image>", "</image>")
    image = files.token_text("image_token", "<|image_pad|>")
    numbered = rules.flag("use_image_id", default=True)
    return files.config(
        tower,
        processor,
        family="MiniCPM-V",
        image_token_id=files.image_token(248056, "image_token_id"),
        placeholder=image,
        image_text=image,
        start=start,
        end=end,
        tile_marks=marks("slice", "<slice>", "</slice>"),
        number_marks=marks("image_id", "<image_id>", "</image_id>") if numbered else (),
    )
