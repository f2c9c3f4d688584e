"""Families whose towers are plain vision transformers with a class embedding: InternViT, Llama 4's, CLIP."""

from dataclasses import replace

from ..fields import MAX_WIDTH, show
from .config import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    MAX_SIDE,
    ImageProcessorConfig,
    TowerConfig,
    TowerNames,
    VisionConfig,
    VisionFiles,
    activation_of,
    pixels_of,
    rope_theta,
    side_of,
    size_of,
    sizes_of,
    token_id,
    token_text,
)
from .qwen import feature_layer, pixtral
from .siglip import LINEARS, siglip_names


def internvl(files: VisionFiles) -> VisionConfig:
    fields, model, rules = files.tower, files.model, files.processor
    sizes = sizes_of(fields, width=1024, inner=4096, layers=24)
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
    layers, wide_norms = feature_layer(files, sizes["num_layers"]), fields.flag("use_qk_norm", default=False)
    eps = fields.number("layer_norm_eps", 1e-6)
    if wide_norms and eps != 1e-6:
        raise fields.error(f"layer_norm_eps {eps} is not supported with use_qk_norm, only 1e-6")
    picture = side_of(fields, "image_size", 448)
    tile = side_of(rules, "size", picture)
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
        activation=activation_of(fields, "gelu"),
        eps=eps,
        is_rms=norm == "rms_norm",
        attention_bias=fields.flag("attention_bias", default=False),
        output_bias=True,
        wide_norms=wide_norms,
        table="bicubic",
        table_rows=(picture // patch) ** 2,
        merge=merge,
        projector="pixel_shuffle_mlp",
        projector_size=files.hidden_size,
        projector_bias=True,
        projector_eps=1e-5,
        projector_activation=activation_of(model, "gelu", "projector_hidden_act"),
    )
    most = rules.integer("max_patches", 12, most=64)
    processor = ImageProcessorConfig(
        kind="canvas",
        unit=patch * merge,
        tile=tile,
        splits=most > 1,  # its processor asks for tiles whatever `crop_to_patches` of the file says
        tile_counts=(rules.integer("min_patches", 1, most=most), most),
        **pixels_of(files, CLIP_MEAN, CLIP_STD, 3),
    )
    image = token_text(files, "context_image_token", "<IMG_CONTEXT>")
    return VisionConfig(
        family="InternVL",
        image_token_id=token_id(files, 151667, "image_token_id"),
        placeholder=image,
        image_text=image,
        start=token_text(files, "start_image_token", "<img>"),
        end=token_text(files, "end_image_token", "</img>"),
        hidden_size=files.hidden_size,
        tower=tower,
        processor=processor,
    )


def llama4(files: VisionFiles) -> VisionConfig:
    fields, rules = files.tower, files.processor
    sizes = sizes_of(fields, width=768, inner=5632, layers=34)
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
    picture = side_of(fields, "image_size", 448)
    if side_of(rules, "size", picture) != picture or picture // patch % merge:
        raise rules.error(
            f"size must be that of the tower, {picture}, and of squares of {merge} x {merge} patches"
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
        table_rows=(picture // patch) ** 2,
        class_is_last=True,
        rope="pairs",
        rope_theta=rope_theta(fields),
        merge=merge,
        projector="llama4",
        projector_size=width,
    )
    most = rules.integer("max_patches", 16, most=64)
    processor = ImageProcessorConfig(
        kind="padded_canvas",
        unit=patch * merge,
        tile=picture,
        splits=most > 1,
        tile_counts=(1, most),
        **pixels_of(files, HALF, HALF, 2),
    )
    return VisionConfig(
        family="Llama 4",
        image_token_id=token_id(files, 200092, "image_token_id", "image_token_index"),
        placeholder="<|image|>",
        image_text="<|patch|>",
        start="<|image_start|>",
        end="<|image_end|>",
        hidden_size=files.hidden_size,
        tower=tower,
        processor=processor,
    )


def llava(files: VisionFiles) -> VisionConfig:
    """Read LLaVA with a tower of CLIP or SigLIP, each of whose patches is an embedding, or Pixtral 12B."""
    fields, model = files.tower, files.model
    kind = fields.text("model_type", "clip_vision_model")
    known = {"pixtral": "full", "clip_vision_model": "default", "siglip_vision_model": "full"}
    if kind not in known:
        raise fields.error(f"a tower of {show(kind)} is not supported in LLaVA, only of {', '.join(known)}")
    if (strategy := model.text("vision_feature_select_strategy", "default")) != known[kind]:
        raise model.error(
            f"vision_feature_select_strategy {show(strategy)} is not supported for a tower of {kind}, only "
            f"{known[kind]}"
        )
    if kind == "pixtral":
        return pixtral(files)
    is_clip = kind == "clip_vision_model"
    patch = 32 if is_clip else 16
    sizes = sizes_of(fields, width=768, inner=3072, layers=12, heads=12, patch=patch)
    layers = feature_layer(files, sizes["num_layers"], -2)
    picture = side_of(fields, "image_size", 224)
    names = replace(siglip_names("vision_tower.", "", *LINEARS), post_norm="")
    if is_clip:
        at = "vision_tower."
        names = replace(
            names, class_embedding=f"{at}embeddings.class_embedding", pre_norm=f"{at}pre_layrnorm"
        )
    tower = TowerConfig(
        **sizes | {"num_layers": layers},
        names=names,
        activation=activation_of(fields, "quick_gelu" if is_clip else "gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        patch_bias=not is_clip,
        table="whole",
        table_rows=(picture // sizes["patch_size"]) ** 2,
        projector="llava",
        projector_norm=False,
        projector_size=files.hidden_size,
        projector_bias=model.flag("multimodal_projector_bias", default=True),
        projector_activation=activation_of(model, "gelu", "projector_hidden_act"),
    )
    image = token_text(files, "image_token", "<image>")
    return VisionConfig(
        family="LLaVA",
        image_token_id=token_id(files, 32000, "image_token_index", "image_token_id"),
        placeholder=image,
        image_text=image,
        hidden_size=files.hidden_size,
        tower=tower,
        processor=_llava_processor(files, tower, picture, is_clip=is_clip),
    )


def _llava_processor(
    files: VisionFiles, tower: TowerConfig, picture: int, *, is_clip: bool
) -> ImageProcessorConfig:
    rules = files.processor
    if rules.flag("do_pad", default=False):
        raise rules.error("do_pad true is not supported")
    is_siglip = "siglip" in rules.text("image_processor_type", "clip" if is_clip else "siglip").lower()
    crops = rules.flag("do_center_crop", default=not is_siglip)
    edge = size_of(rules, "size", ("shortest_edge", "height"), picture, MAX_SIDE)
    if {edge, size_of(rules, "size", ("width",), edge, MAX_SIDE)} != {picture} or (
        crops and side_of(rules, "crop_size", picture) != picture
    ):
        raise rules.error(f"size and crop_size must be that of the tower, {picture}")
    keeps_ratio = (rules.mapping("size") or {}).get("height") is None and not is_siglip
    if keeps_ratio and not crops:
        raise rules.error("do_center_crop false with shortest_edge is not supported")
    mean, std = (HALF, HALF) if is_siglip else (CLIP_MEAN, CLIP_STD)
    return ImageProcessorConfig(
        kind="center_crop" if keeps_ratio else "square",
        unit=tower.patch_size,
        tile=picture,
        **pixels_of(files, mean, std, 3),
    )
