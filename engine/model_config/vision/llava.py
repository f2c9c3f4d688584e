"""Families of LLaVA's make: LLaVA, LLaVA-NeXT, OneVision, Aya Vision, Pixtral, Mistral 3, LightOnOCR."""

from dataclasses import replace
from typing import Any, Final

from ..families.siblings import granite_scales
from ..fields import MAX_WIDTH, show
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
from .fields import VisionFields, VisionFiles


def mistral3(files: VisionFiles) -> VisionConfig:
    fields, model = files.tower, files.model
    sizes = fields.sizes(width=1024, inner=4096, layers=24, patch=16)
    merge = model.integer("spatial_merge_size", 2, most=64)
    tower = TowerConfig(
        **sizes | {"num_layers": files.feature_layer(sizes["num_layers"])},
        names=TowerNames(
            patch="vision_tower.patch_conv",
            layers="vision_tower.transformer.layers",
            pre_norm="vision_tower.ln_pre",
            norm1="attention_norm",
            norm2="ffn_norm",
            query="attention.q_proj",
            key="attention.k_proj",
            value="attention.v_proj",
            output="attention.o_proj",
            gate="feed_forward.gate_proj",
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
            projector=("multi_modal_projector.norm", *LINEARS),
        ),
        activation=fields.activation("gelu"),
        eps=1e-5,
        is_rms=True,
        attention_bias=False,
        mlp_bias=False,
        patch_bias=False,
        rope="alternating",
        rope_theta=fields.rope_theta(),
        merge=merge,
        projector="mistral3",
        projector_size=files.hidden_size,
        projector_bias=model.flag("multimodal_projector_bias", default=False),
        projector_eps=files.text.number("rms_norm_eps", 1e-6),
        projector_activation=model.activation("gelu", "projector_hidden_act"),
    )
    longest = files.processor.size("size", ("longest_edge", "height"), 1540, MAX_SIDE)
    processor = ImageProcessorConfig(
        kind="longest_edge",
        unit=tower.patch_size * merge,
        longest=longest,
        **files.pixels(CLIP_MEAN, CLIP_STD, 3),
    )
    return files.config(
        tower,
        processor,
        family="Mistral 3",
        image_token_id=files.image_token(10, "image_token_index", "image_token_id"),
        placeholder="[IMG]",
        image_text="[IMG]",
        line_end="[IMG_BREAK]",
        end="[IMG_END]",
    )


def pixtral(files: VisionFiles) -> VisionConfig:
    """Read Pixtral 12B as it was first published: the tower of Mistral 3, and each patch is an embedding."""
    model = files.model
    raw = {
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
        **model.raw,
        "spatial_merge_size": 1,
    }
    rules = {"size": {"longest_edge": 1024}, **files.processor.raw}
    processor = VisionFields(rules, files.processor.where)
    found = mistral3(replace(files, model=VisionFields(raw, model.where), processor=processor))
    names = replace(found.tower.names, projector=("", *LINEARS))
    tower = replace(found.tower, names=names, projector="llava", projector_norm=False)
    return replace(found, family="Pixtral", tower=tower)


def lighton_ocr(files: VisionFiles) -> VisionConfig:
    """Read LightOnOCR: Mistral 3's tower without tokens between the lines of an image."""
    image = files.token_text("image_token", "<|image_pad|>")
    return replace(
        mistral3(files),
        family="LightOnOCR",
        image_token_id=files.image_token(151655, "image_token_id"),
        placeholder=image,
        image_text=image,
        line_end="",
        end="",
    )


def llava(files: VisionFiles) -> VisionConfig:
    """Read LLaVA with a tower of CLIP or SigLIP, each of whose patches is an embedding, or Pixtral 12B."""
    if files.tower.raw.get("model_type") == "pixtral":
        _tower_kind(files)
        return pixtral(files)
    tower, image_side = _llava_tower(files)
    processor = _llava_processor(files, tower, image_side)
    return _llava(files, "LLaVA", tower, processor, 32000)


def llava_next(files: VisionFiles) -> VisionConfig:
    """Read LLaVA-NeXT (LLaVA 1.6): that of LLaVA, and tiles of a canvas."""
    tower, image_side = _llava_tower(files)
    canvases = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    found = _anyres(files, "LLaVA-NeXT", tower, image_side, canvases, 32000)
    if str(files.text.raw.get("model_type")).startswith("granite"):
        return replace(found, embedding_scale=granite_scales(files.text).embedding)
    return found


def llava_onevision(files: VisionFiles) -> VisionConfig:
    """Read LLaVA-OneVision: that of LLaVA-NeXT with SigLIP, whose patches of large canvases are shrunk."""
    rule = files.model.text("vision_aspect_ratio", "anyres_max_9")
    kept = rule.removeprefix("anyres_max_")
    if kept == rule or kept not in map(str, range(1, MAX_TILES + 1)):
        raise files.model.error(f"vision_aspect_ratio {show(rule)} is not supported, only anyres_max_9")
    tower, image_side = _llava_tower(_with_siglip(files))
    canvases = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
    found = _anyres(files, "LLaVA-OneVision", tower, image_side, canvases, 151646)
    return replace(found, processor=replace(found.processor, kept_tiles=int(kept)))


def aya_vision(files: VisionFiles) -> VisionConfig:
    """Read Aya Vision: SigLIP over tiles, and a projector with a gate."""
    inner = files.model.integer("alignment_intermediate_size", files.hidden_size, most=MAX_WIDTH)
    return replace(
        _cohere(files, "Aya Vision", "multi_modal_projector.layernorm", inner, "canvas"),
        placeholder="<image>",
        tile_marks=("TILE_", ""),
    )


def cohere2_vision(files: VisionFiles) -> VisionConfig:
    """Read Command A Vision: that of Aya Vision with SigLIP's last norm and none in the projector."""
    inner = files.model.integer("alignment_intermediate_size", 36864, most=MAX_WIDTH)
    model = VisionFields({**files.model.raw, "vision_feature_layer": -1}, files.model.where)
    found = _cohere(replace(files, model=model), "Command A Vision", "", inner, "fitted_canvas")
    names = replace(found.tower.names, post_norm="vision_tower.post_layernorm")
    return replace(
        found,
        tower=replace(found.tower, names=names),
        tile_marks=("", files.token_text("img_line_break_token", "<|IMG_LINE_BREAK|>")),
    )


def _cohere(files: VisionFiles, family: str, norm: str, inner: int, kind: ResizeKind) -> VisionConfig:
    """Build the config of a family with a gate in its projector. `norm`: of the projector."""
    rules = files.processor
    tower, image_side = _llava_tower(_with_siglip(files))
    merge = files.model.integer("downsample_factor", 2, most=64)
    if tower.joined_layers or inner % 2 or image_side // tower.patch_size % merge:
        raise files.model.error(
            f"only one vision_feature_layer, images of whole squares of {merge} x {merge} patches and "
            "an even alignment_intermediate_size are supported"
        )
    if rules.side("size", image_side) != image_side:
        raise rules.error(f"size must be that of the tower, {image_side}")
    most = rules.integer("max_patches", 12, most=MAX_TILES)
    processor = ImageProcessorConfig(
        kind=kind,
        unit=tower.patch_size * merge,
        tile=image_side,
        splits=most > 1 and rules.flag("crop_to_patches", default=True),
        tile_counts=(rules.integer("min_patches", 1, most=most), most),
        **files.pixels(CLIP_MEAN, CLIP_STD, 3),
    )
    tower = replace(
        tower,
        names=replace(tower.names, projector=(norm, *LINEARS)),
        merge=merge,
        projector="pixel_shuffle_gated",
        projector_size=inner,
        projector_bias=True,
        projector_norm=bool(norm),
        projector_eps=files.model.number("adapter_layer_norm_eps", 1e-6),
        projector_activation="silu",
    )
    image = files.token_text("image_token", "<|IMG_PATCH|>")
    return files.config(
        tower,
        processor,
        family=family,
        image_token_id=files.image_token(255036, "image_token_index", "image_token_id"),
        placeholder=image,
        image_text=image,
        start=files.token_text("boi_token", "<|START_OF_IMG|>"),
        end=files.token_text("eoi_token", "<|END_OF_IMG|>"),
    )


def _with_siglip(files: VisionFiles) -> VisionFiles:
    """Return the files of a family whose tower is SigLIP where they do not say it."""
    raw = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, **files.model.raw}
    tower = {"model_type": "siglip_vision_model", **files.tower.raw}
    return replace(
        files, model=VisionFields(raw, files.model.where), tower=VisionFields(tower, files.tower.where)
    )


def _tower_kind(files: VisionFiles) -> str:
    """Return the class of the tower. Raises ModelError for one that is not supported in LLaVA."""
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
    return kind


def _llava_tower(files: VisionFiles) -> tuple[TowerConfig, int]:
    """Return a tower of CLIP or SigLIP, and the side of its image."""
    fields, model = files.tower, files.model
    kind = _tower_kind(files)
    is_clip = kind == "clip_vision_model"
    patch = 32 if is_clip else 16
    sizes = fields.sizes(width=768, inner=3072, layers=12, heads=12, patch=patch)
    layers = files.feature_layers(sizes["num_layers"], -2)
    image_side = fields.side("image_size", 224)
    names = replace(TowerNames.siglip("vision_tower.", "", *LINEARS), post_norm="")
    if is_clip:
        at = "vision_tower."
        names = replace(
            names, class_embedding=f"{at}embeddings.class_embedding", pre_norm=f"{at}pre_layrnorm"
        )
    tower = TowerConfig(
        **sizes | {"num_layers": max(layers)},
        names=names,
        joined_layers=layers if len(layers) > 1 else (),
        activation=fields.activation("quick_gelu" if is_clip else "gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        patch_bias=not is_clip,
        table="whole",
        table_rows=(image_side // sizes["patch_size"]) ** 2,
        projector="llava",
        projector_norm=False,
        projector_size=files.hidden_size,
        projector_bias=model.flag("multimodal_projector_bias", default=True),
        projector_activation=model.activation("gelu", "projector_hidden_act"),
    )
    return tower, image_side


def _llava(
    files: VisionFiles, family: str, tower: TowerConfig, processor: ImageProcessorConfig, token: int
) -> VisionConfig:
    image = files.token_text("image_token", "<image>")
    return files.config(
        tower,
        processor,
        family=family,
        image_token_id=files.image_token(token, "image_token_index", "image_token_id"),
        placeholder=image,
        image_text=image,
    )


MAX_TILES: Final = 64
"""Most tiles of a canvas."""


def _anyres(
    files: VisionFiles,
    family: str,
    tower: TowerConfig,
    image_side: int,
    canvases: tuple[tuple[int, int], ...],
    token: int,
) -> VisionConfig:
    """Build the config of a family with canvases of tiles. `canvases`, `token`: rows and columns of each
    canvas, and the image token, where the files do not have them.
    """
    key, rules = "image_grid_pinpoints", files.processor
    usual = [[rows * image_side, columns * image_side] for rows, columns in canvases]
    found: list[Any] = rules.raw.get(key) or files.model.raw.get(key) or usual
    if found != (files.model.raw.get(key) or found):
        raise rules.error(f"{key} is not that of config.json: fetch the model again")
    sides = range(image_side, MAX_TILES * image_side + 1, image_side)
    if not isinstance(found, list) or not all(
        isinstance(each, list)
        and len(each) == 2
        and all(type(edge) is int and edge in sides for edge in each)
        and each[0] * each[1] <= MAX_TILES * image_side**2
        for each in found
    ):
        raise rules.error(f"{key} must be heights and widths of at most {MAX_TILES} tiles of {image_side}")
    edges = {
        rules.size("size", (name,), image_side, MAX_SIDE) for name in ("shortest_edge", "height", "width")
    }
    crops = rules.flag("do_center_crop", default=False)
    if edges != {image_side} or (crops and rules.side("crop_size", image_side) != image_side):
        raise rules.error(f"size and crop_size must be that of the tower, {image_side}")
    processor = ImageProcessorConfig(
        kind="anyres",
        unit=tower.patch_size,
        tile=image_side,
        splits=True,
        canvases=tuple((tall, wide) for tall, wide in found),
        **files.pixels(CLIP_MEAN, CLIP_STD, 3),
    )
    tower = replace(tower, names=replace(tower.names, newline="image_newline"))
    return _llava(files, family, tower, processor, token)


def _llava_processor(files: VisionFiles, tower: TowerConfig, image_side: int) -> ImageProcessorConfig:
    rules, is_clip = files.processor, bool(tower.names.class_embedding)
    if rules.flag("do_pad", default=False):
        raise rules.error("do_pad true is not supported")
    is_siglip = "siglip" in rules.text("image_processor_type", "clip" if is_clip else "siglip").lower()
    crops = rules.flag("do_center_crop", default=not is_siglip)
    edge = rules.size("size", ("shortest_edge", "height"), image_side, MAX_SIDE)
    if {edge, rules.size("size", ("width",), edge, MAX_SIDE)} != {image_side} or (
        crops and rules.side("crop_size", image_side) != image_side
    ):
        raise rules.error(f"size and crop_size must be that of the tower, {image_side}")
    keeps_ratio = (rules.mapping("size") or {}).get("height") is None and not is_siglip
    if keeps_ratio and not crops:
        raise rules.error("do_center_crop false with shortest_edge is not supported")
    mean, std = (HALF, HALF) if is_siglip else (CLIP_MEAN, CLIP_STD)
    return ImageProcessorConfig(
        kind="center_crop" if keeps_ratio else "square",
        unit=tower.patch_size,
        tile=image_side,
        **files.pixels(mean, std, 3),
    )
