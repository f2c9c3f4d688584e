"""Families of SigLIP and CLIP whose images, or their tiles, have the size of the tower: LLaVA, Gemma 3."""

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
    TileText,
    siglip_names,
)
from .fields import (
    MAX_TILES,
    FieldReader,
    FieldRule,
    Key,
    Side,
    VisionFamily,
    feature_layers,
    hidden_act,
    hidden_size_of_text,
    image_token,
    sizes,
    token_text,
)
from .native_size import PIXTRAL

CLIP_PIXELS: Final = (CLIP_MEAN, CLIP_STD, 3)
HALF_PIXELS: Final = (HALF, HALF, 3)
"""Mean, deviation and filter."""
SIGLIP: Final = VisionFamily(
    name="SigLIP",
    names=siglip_names("vision_tower.", "", *LINEARS),
    rules={
        **sizes(768, 3072, 12, heads=12, patch=16),
        "activation": hidden_act("gelu_pytorch_tanh"),
        "image_side": Side("image_size", 224),
        "table": "whole",
        "usual_pixels": HALF_PIXELS,
    },
)
"""Tower of SigLIP, for families that have it."""


OTHER_SIZES: Final[dict[str, FieldRule]] = {
    "processor: size must be that of the tower, {at.image_side}": lambda at: (
        at.processor.side("size", at.image_side) != at.image_side
    )
}


def _check_tower(at: FieldReader) -> None:
    """Refuse a tower that is not supported in LLaVA, and one whose class embedding is kept or missing."""
    fields, model = at.tower, at.config
    kind = fields.text("model_type", at.usual_tower or "clip_vision_model")
    known = {"clip_vision_model": "default", "siglip_vision_model": "full"}
    if at.rope:  # that of Mistral 3
        known = {"pixtral": "full"}
    if kind not in known:
        raise fields.error(f"a tower of {show(kind)} is not supported in LLaVA, only of {', '.join(known)}")
    usual = at.usual_strategy or "default"
    if (strategy := model.text("vision_feature_select_strategy", usual)) != known[kind]:
        raise model.error(
            f"vision_feature_select_strategy {show(strategy)} is not supported for a tower of {kind}, only "
            f"{known[kind]}"
        )


def _is_siglip_processor(at: FieldReader) -> bool:
    usual = "clip" if at.is_clip else "siglip"
    return "siglip" in at.processor.text("image_processor_type", usual).lower()


def _keeps_ratio(at: FieldReader) -> bool:
    size = at.processor.mapping("size") or {}
    return size.get("height") is None and not _is_siglip_processor(at)


def _check_llava_sizes(at: FieldReader) -> None:
    rules = at.processor
    crops = rules.flag("do_center_crop", default=not _is_siglip_processor(at))
    check_size(at, crops=crops)
    if _keeps_ratio(at) and not crops:
        raise rules.error("do_center_crop false with shortest_edge is not supported")


def check_size(at: FieldReader, *, crops: bool) -> None:
    """Refuse another size than that of the tower, before or after the middle is cut from an image."""
    rules, side = at.processor, at.image_side
    for name in ("shortest_edge", "height", "width"):
        fields, key = at.files.find(f"size.{name}", "processor")
        if fields.integer(key, side, most=MAX_SIDE) != side:
            raise rules.error(f"size and crop_size must be that of the tower, {side}")
    if crops and rules.side("crop_size", side) != side:
        raise rules.error(f"size and crop_size must be that of the tower, {side}")


LLAVA_SIGLIP: Final = SIGLIP.but(
    "LLaVA",
    {"post_norm": ""},
    checks=(_check_tower,),
    is_clip=False,
    feature_layer=-2,
    layers_read=feature_layers,
    num_layers=lambda at: max(at.layers_read),
    joined_layers=lambda at: at.layers_read if len(at.layers_read) > 1 else (),
    projector="llava",
    projector_norm=False,
    projector_bias=Key("model.multimodal_projector_bias", default=True),
    image_token_id=image_token(32000),
    image_text=token_text("image_token", "<image>"),
)
LLAVA_CLIP: Final = LLAVA_SIGLIP.but(
    "LLaVA",
    {
        "class_embedding": "vision_tower.embeddings.class_embedding",
        "pre_norm": "vision_tower.pre_layrnorm",
    },
    is_clip=True,
    patch_size=Side("patch_size", 32),
    activation=hidden_act("quick_gelu"),
    eps=Key("layer_norm_eps", 1e-5),
    patch_bias=False,
)


def _whole(family: VisionFamily) -> VisionFamily:
    """Return a LLaVA whose images are not cut."""
    return family.but(
        family.name,
        only={"processor.do_pad": False},
        checks=(_check_llava_sizes,),
        kind=lambda at: "center_crop" if _keeps_ratio(at) else "square",
        tile=lambda at: at.image_side,
        usual_pixels=lambda at: HALF_PIXELS if _is_siglip_processor(at) else CLIP_PIXELS,
    )


LLAVA: Final = {
    "clip_vision_model": _whole(LLAVA_CLIP),
    "siglip_vision_model": _whole(LLAVA_SIGLIP),
    "pixtral": PIXTRAL.but(PIXTRAL.name, checks=(_check_tower,)),
}
"""Families by the `model_type` of their tower; the first one where it has none."""


VIPLLAVA: Final = _whole(LLAVA_CLIP).but(
    "VipLLaVA",
    {"projector": ("multi_modal_projector.projector_layernorm", *LINEARS)},
    feature_layer=[-2, -5, -8, -11, 6],
    projector_norm=True,
    projector_bias=True,
    projector_eps=Key("model.projector_layernorm_eps", 1e-5),
)


def _gemma3_texts(at: FieldReader) -> TileText:
    start = at.files.token_text("boi_token", "<start_of_image>")
    each = f"\n\n{start}{{tokens}}{at.files.token_text('eoi_token', '<end_of_image>')}\n\n"
    return TileText(
        tile=each,
        single=each,
        column_join=" ",
        row_join=" ",
        whole=f"Here is the original image {each} and here are some crops to help you see better ",
        whole_first=True,
    )


def _if_cropped(paths: str, default: Any, most: int = MAX_SIDE) -> Any:
    """Return the rule for a value of Gemma 3's crops (pan and scan)."""
    return lambda at: Key(paths, default, most).read(at, "processor") if at.splits else 0


GEMMA3: Final = SIGLIP.but(
    "Gemma 3",
    {
        "projector": (
            "multi_modal_projector.mm_soft_emb_norm",
            "multi_modal_projector.mm_input_projection",
            "",
        )
    },
    refuse={
        "config: mm_tokens_per_image {at.tokens} is no square of at "
        "most {at.patches_across} rows": lambda at: (
            at.across**2 != at.tokens or at.across > at.patches_across
        ),
        "config: mm_tokens_per_image {at.tokens} does not divide the {at.patches_across} x "
        "{at.patches_across} patches": lambda at: at.patches_across % at.across,
        **OTHER_SIZES,
    },
    tokens=Key("model.mm_tokens_per_image", 256, 1 << 16),
    across=lambda at: round(at.tokens**0.5),
    patches_across=lambda at: at.image_side // at.patch_size,
    merge=lambda at: at.patches_across // at.across,
    projector="gemma3",
    projector_eps=lambda at: at.eps,
    kind="square",
    unit=lambda at: at.image_side // at.across,
    tile=lambda at: at.image_side,
    splits=Key("do_pan_and_scan", default=False),
    crop=_if_cropped("pan_and_scan_min_crop_size", 256),
    tile_counts=lambda at: (1, _if_cropped("pan_and_scan_max_num_crops", 4, MAX_TILES)(at) or 1),
    tolerance=lambda at: _if_cropped("pan_and_scan_min_ratio_to_activate", 1.2)(at) or 1.0,
    usual_pixels=(HALF, HALF, 2),
    image_token_id=image_token(262144),
    placeholder=token_text("boi_token", "<start_of_image>"),
    image_text=token_text("image_token", "<image_soft_token>"),
    tile_text=_gemma3_texts,
    is_bidirectional=True,
)


def tile_counts(least: int | Key, most: Any, may_split: Any = True) -> dict[str, Any]:
    """Return the rules of the least and most tiles of an image, and of whether it is cut."""

    def read(at: FieldReader) -> tuple[int, int]:
        few = replace(least, most=at.most_tiles).read(at, "model") if isinstance(least, Key) else least
        return few, at.most_tiles

    return {
        "most_tiles": most,
        "tile_counts": read,
        "may_split": may_split,
        "splits": lambda at: at.may_split and at.most_tiles > 1,
    }


PATCH_COUNTS: Final = Key("processor.min_patches", 1), Key("processor.max_patches", 12, MAX_TILES)
_FULL_SIGLIP: Final[dict[str, Any]] = {
    "usual_tower": "siglip_vision_model",
    "usual_strategy": "full",
    "feature_layer": -1,
}
AYA_VISION: Final = LLAVA_SIGLIP.but(
    "Aya Vision",
    {"projector": ("multi_modal_projector.layernorm", *LINEARS)},
    refuse={
        "config: only one vision_feature_layer, images of whole squares of {at.merge} x {at.merge} "
        "patches and an even alignment_intermediate_size are supported": lambda at: (
            at.joined_layers or at.projector_size % 2 or at.image_side // at.patch_size % at.merge
        ),
        **OTHER_SIZES,
    },
    **_FULL_SIGLIP,
    merge=Key("model.downsample_factor", 2, MAX_TILES),
    projector="pixel_shuffle_gated",
    projector_size=Key("model.alignment_intermediate_size", hidden_size_of_text, MAX_WIDTH),
    projector_bias=True,
    projector_norm=True,
    projector_eps=Key("model.adapter_layer_norm_eps", 1e-6),
    projector_activation="silu",
    kind="canvas",
    tile=lambda at: at.image_side,
    **tile_counts(*PATCH_COUNTS, Key("processor.crop_to_patches", default=True)),
    usual_pixels=CLIP_PIXELS,
    image_token_id=image_token(255036),
    placeholder="<image>",
    image_text=token_text("image_token", "<|IMG_PATCH|>"),
    start=token_text("boi_token", "<|START_OF_IMG|>"),
    end=token_text("eoi_token", "<|END_OF_IMG|>"),
    tile_text=TileText(tile="TILE_{number}{tokens}", whole="TILE_GLOBAL{tokens}"),
)


def _line_ended(at: FieldReader) -> TileText:
    text = "{tokens}" + at.files.token_text("img_line_break_token", "<|IMG_LINE_BREAK|>")
    return TileText(tile=text, whole=text)


COHERE2_VISION: Final = AYA_VISION.but(
    "Command A Vision",
    {"projector": ("", *LINEARS), "post_norm": "vision_tower.post_layernorm"},
    layers_read=lambda at: (at.stored_layers,),
    projector_size=Key("model.alignment_intermediate_size", 36864, MAX_WIDTH),
    projector_norm=False,
    kind="fitted_canvas",
    placeholder=lambda at: at.image_text,
    tile_text=_line_ended,
)


def _canvases(at: FieldReader) -> tuple[tuple[int, int], ...]:
    """Return (height, width) of the canvases of tiles."""
    key, side, rules = "image_grid_pinpoints", at.image_side, at.processor
    usual = [[rows * side, columns * side] for rows, columns in at.usual_canvases]
    own = at.config.raw.get(key)
    found: Any = rules.raw.get(key) or own or usual
    if found != (own or found):
        raise rules.error(f"{key} is not that of config.json: fetch the model again")
    edges = range(side, MAX_TILES * side + 1, side)
    if not isinstance(found, list) or not all(
        isinstance(each, list)
        and len(each) == 2
        and all(type(edge) is int and edge in edges for edge in each)
        and each[0] * each[1] <= MAX_TILES * side**2
        for each in found
    ):
        raise rules.error(f"{key} must be heights and widths of at most {MAX_TILES} tiles of {side}")
    return tuple((tall, wide) for tall, wide in found)


def _embedding_scale(at: FieldReader) -> float:
    text = at.files.text
    return granite_scales(text).embedding if str(text.raw.get("model_type")).startswith("granite") else 1.0


def _anyres(family: VisionFamily) -> VisionFamily:
    """Return LLaVA-NeXT (LLaVA 1.6) with this tower: that of LLaVA, and tiles of a canvas."""
    return family.but(
        "LLaVA-NeXT",
        {"newline": "image_newline"},
        checks=(lambda at: check_size(at, crops=at.crops),),
        kind="anyres",
        tile=lambda at: at.image_side,
        splits=True,
        crops=Key("processor.do_center_crop", default=False),
        usual_canvases=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)),
        canvases=_canvases,
        usual_pixels=CLIP_PIXELS,
        embedding_scale=_embedding_scale,
    )


def _kept_tiles(at: FieldReader) -> int:
    rule = at.config.text("vision_aspect_ratio", "anyres_max_9")
    kept = rule.removeprefix("anyres_max_")
    if kept == rule or kept not in map(str, range(1, MAX_TILES + 1)):
        raise at.config.error(f"vision_aspect_ratio {show(rule)} is not supported, only anyres_max_9")
    return int(kept)


LLAVA_NEXT: Final = {
    "clip_vision_model": _anyres(LLAVA_CLIP),
    "siglip_vision_model": _anyres(LLAVA_SIGLIP),
}
LLAVA_NEXT_VIDEO: Final = {
    kind: family.but("LLaVA-NeXT-Video", image_token_id=image_token(32001))
    for kind, family in LLAVA_NEXT.items()
}
LLAVA_ONEVISION: Final = _anyres(LLAVA_SIGLIP).but(
    "LLaVA-OneVision",
    **_FULL_SIGLIP,
    usual_canvases=tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7)),
    kept_tiles=_kept_tiles,
    image_token_id=image_token(151646),
)
"""LLaVA-NeXT with SigLIP, whose patches of large canvases are shrunk."""
