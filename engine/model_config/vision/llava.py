"""Families of LLaVA's make, with a tower of CLIP, SigLIP or Pixtral: LLaVA, Pixtral 12B, Mistral 3."""

from dataclasses import replace

from ..fields import show
from .config import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    LINEARS,
    MAX_SIDE,
    ImageProcessorConfig,
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
    sizes = fields.sizes(width=768, inner=3072, layers=12, heads=12, patch=patch)
    layers = files.feature_layer(sizes["num_layers"], -2)
    image_side = fields.side("image_size", 224)
    names = replace(TowerNames.siglip("vision_tower.", "", *LINEARS), post_norm="")
    if is_clip:
        at = "vision_tower."
        names = replace(
            names, class_embedding=f"{at}embeddings.class_embedding", pre_norm=f"{at}pre_layrnorm"
        )
    tower = TowerConfig(
        **sizes | {"num_layers": layers},
        names=names,
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
    image = files.token_text("image_token", "<image>")
    return files.config(
        tower,
        _llava_processor(files, tower, image_side, is_clip=is_clip),
        family="LLaVA",
        image_token_id=files.image_token(32000, "image_token_index", "image_token_id"),
        placeholder=image,
        image_text=image,
    )


def _llava_processor(
    files: VisionFiles, tower: TowerConfig, image_side: int, *, is_clip: bool
) -> ImageProcessorConfig:
    rules = files.processor
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
