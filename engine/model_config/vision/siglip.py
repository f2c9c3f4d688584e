"""Families whose towers are SigLIP's or Gemma 4's: images are cut into tiles, or pooled."""

from typing import Any, Final

from ..fields import MAX_WIDTH
from .config import (
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
from .qwen import feature_layer

LINEARS: Final = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")


def siglip_names(at: str, *projector: str) -> TowerNames:
    return TowerNames(
        patch=f"{at}embeddings.patch_embedding",
        layers=f"{at}encoder.layers",
        table=f"{at}embeddings.position_embedding.weight",
        post_norm=f"{at}post_layernorm",
        norm1="layer_norm1",
        norm2="layer_norm2",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.out_proj",
        projector=projector,
    )


def idefics3(files: VisionFiles) -> VisionConfig:
    fields, model = files.tower, files.model
    sizes = sizes_of(fields, width=1152, inner=3072, layers=12, patch=32)
    side = side_of(fields, "image_size", 224) // sizes["patch_size"]
    merge = model.integer("scale_factor", 2, most=64)
    tower = TowerConfig(
        **sizes,
        names=siglip_names("vision_model.", "", "connector.modality_projection.proj", ""),
        activation=activation_of(fields, "gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6),
        table="buckets",
        table_rows=side * side,
        merge=merge,
        projector="pixel_shuffle",
    )
    rules, unit = files.processor, tower.patch_size * merge
    tile = size_of(rules, "max_image_size", ("longest_edge",), 364, MAX_SIDE)
    if not tile // tower.patch_size or tile // tower.patch_size % merge:
        raise rules.error(f"max_image_size {tile} has no whole squares of {merge} x {merge} patches")
    processor = ImageProcessorConfig(
        kind="tiles",
        unit=unit,
        longest=size_of(rules, "size", ("longest_edge",), 4 * 364, MAX_SIDE),
        tile=tile,
        splits=rules.flag("do_image_splitting", default=True),
        **pixels_of(files, HALF, HALF, 1),
    )
    return VisionConfig(
        family="SmolVLM, Idefics3",
        image_token_id=token_id(files, 128257, "image_token_id"),
        placeholder="<image>",
        image_text="<image>",
        start="<fake_token_around_image>",
        hidden_size=files.hidden_size,
        tower=tower,
        processor=processor,
    )


_GEMMA3_PROJECTION: Final = "multi_modal_projector.mm_input_projection"


def gemma3(files: VisionFiles) -> VisionConfig:
    fields, rules = files.tower, files.processor
    sizes = sizes_of(fields, width=768, inner=3072, layers=12, heads=12, patch=16)
    picture = side_of(fields, "image_size", 224)
    side = picture // sizes["patch_size"]
    count = files.model.integer("mm_tokens_per_image", 256, most=1 << 16)
    across = round(count**0.5)
    if across**2 != count or across > side:
        raise files.model.error(f"mm_tokens_per_image {count} is no square of at most {side} rows")
    if side % across:
        raise files.model.error(f"mm_tokens_per_image {count} does not divide the {side} x {side} patches")
    if side_of(rules, "size", picture) != picture:
        raise rules.error(f"size must be that of the tower, {picture}")
    tower = TowerConfig(
        **sizes,
        names=siglip_names("vision_tower.", "multi_modal_projector.mm_soft_emb_norm", _GEMMA3_PROJECTION, ""),
        activation=activation_of(fields, "gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6),
        table="whole",
        table_rows=side * side,
        merge=side // across,
        projector="gemma3",
        projector_eps=fields.number("layer_norm_eps", 1e-6),
    )
    crops: dict[str, Any] = {}
    if rules.flag("do_pan_and_scan", default=False):
        crops = {
            "splits": True,
            "crop": rules.integer("pan_and_scan_min_crop_size", 256, most=MAX_SIDE),
            "tile_counts": (1, rules.integer("pan_and_scan_max_num_crops", 4, most=64)),
            "tolerance": rules.number("pan_and_scan_min_ratio_to_activate", 1.2),
        }
    processor = ImageProcessorConfig(
        kind="square", unit=picture // across, tile=picture, **crops, **pixels_of(files, HALF, HALF, 2)
    )
    start, image = token_text(files, "boi_token", "<start_of_image>"), "<image_soft_token>"
    return VisionConfig(
        family="Gemma 3",
        image_token_id=token_id(files, 262144, "image_token_index", "image_token_id"),
        placeholder=start,
        image_text=token_text(files, "image_token", image),
        start=f"\n\n{start}",
        end=f"{token_text(files, 'eoi_token', '<end_of_image>')}\n\n",
        hidden_size=files.hidden_size,
        is_bidirectional=True,
        tower=tower,
        processor=processor,
    )


def lfm2_vl(files: VisionFiles) -> VisionConfig:
    fields, model, rules = files.tower, files.model, files.processor
    sizes = sizes_of(fields, width=768, inner=3072, layers=12, heads=12, patch=16)
    merge = model.integer("downsample_factor", 2, most=64)
    tower = TowerConfig(
        **sizes,
        names=siglip_names("vision_tower.", "multi_modal_projector.layer_norm", *LINEARS),
        channels_last=True,
        activation=activation_of(fields, "gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6),
        table="antialiased",
        table_rows=fields.integer("num_patches", 256, most=MAX_WIDTH),
        merge=merge,
        projector="pixel_shuffle_mlp",
        projector_size=model.integer("projector_hidden_size", 2560, most=MAX_WIDTH),
        projector_bias=model.flag("projector_bias", default=True),
        projector_norm=model.flag("projector_use_layernorm", default=True),
        projector_eps=1e-5,
        projector_activation=activation_of(model, "gelu", "projector_hidden_act"),
    )
    if feature_layer(files, tower.num_layers) != tower.num_layers:
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
        **pixels_of(files, HALF, HALF, 2),
    )
    return VisionConfig(
        family="LFM2-VL",
        image_token_id=token_id(files, 396, "image_token_id", "image_token_index"),
        placeholder="<image>",
        image_text="<image>",
        start="<|image_start|>",
        end="<|image_end|>",
        hidden_size=files.hidden_size,
        tower=tower,
        processor=processor,
    )


_GEMMA4_GATED: Final = {
    "gate": "mlp.gate_proj.linear",
    "up": "mlp.up_proj.linear",
    "down": "mlp.down_proj.linear",
}


def gemma4(files: VisionFiles) -> VisionConfig:
    fields = files.tower
    sizes = sizes_of(fields, width=768, inner=3072, layers=16, heads=12, patch=16)
    if fields.integer("num_key_value_heads", sizes["num_heads"]) != sizes["num_heads"]:
        raise fields.error("num_key_value_heads other than num_attention_heads is not supported")
    if fields.integer("head_dim", 64) != sizes["head_dim"] or sizes["head_dim"] % 4:
        raise fields.error(f"head_dim {fields.raw.get('head_dim', 64)} is not supported here")
    merge = fields.integer("pooling_kernel_size", 3, most=64)
    at = "vision_tower."
    names = TowerNames(
        patch=f"{at}patch_embedder.input_proj",
        layers=f"{at}encoder.layers",
        table=f"{at}patch_embedder.position_embedding_table",
        norm1="input_layernorm",
        norm2="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
        query="self_attn.q_proj.linear",
        key="self_attn.k_proj.linear",
        value="self_attn.v_proj.linear",
        output="self_attn.o_proj.linear",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        projector=("", "embed_vision.embedding_projection", ""),
        **_GEMMA4_GATED,
    )
    tower = TowerConfig(
        **sizes,
        names=names,
        channels_last=True,
        activation=activation_of(fields, "gelu_pytorch_tanh", "hidden_activation"),
        eps=fields.number("rms_norm_eps", 1e-6),
        is_rms=True,
        attention_bias=False,
        mlp_bias=False,
        patch_bias=False,
        scales_queries=False,
        table="axes",
        table_rows=fields.integer("position_embedding_size", 10240, most=MAX_WIDTH),
        rope="axial",
        rope_theta=rope_theta(fields, 100.0),
        merge=merge,
        projector="gemma4",
        projector_eps=fields.number("rms_norm_eps", 1e-6),
        clips=fields.flag("use_clipped_linears", default=False),
        standardizes=fields.flag("standardize", default=False),
    )
    return _gemma4_pictures(files, tower, files.text.raw.get("use_bidirectional_attention"))


def gemma4_unified(files: VisionFiles) -> VisionConfig:
    """Read Gemma 4 12B, which has no tower: norms and two linears make embeddings of patches."""
    fields = files.tower
    hidden = fields.integer("mm_embed_dim", 3840, most=MAX_WIDTH)
    if fields.integer("output_proj_dims", hidden) != hidden:
        raise fields.error("output_proj_dims other than mm_embed_dim is not supported")
    side = side_of(fields, "patch_size", 16) * fields.integer("pooling_kernel_size", 3, most=64)
    if side > MAX_SIDE:
        raise fields.error(f"patches of {side} x {side} pixels are beyond anything known")
    at = "vision_embedder."
    names = TowerNames(
        patch=f"{at}patch_dense",
        layers="",
        patch_norm=f"{at}patch_ln1",
        embedded_norm=f"{at}patch_ln2",
        table=f"{at}pos_embedding",
        pre_norm=f"{at}pos_norm",
        projector=("", "embed_vision.embedding_projection", ""),
    )
    tower = TowerConfig(
        names=names,
        hidden_size=hidden,
        intermediate_size=3 * side**2,
        num_layers=0,
        stored_layers=0,
        num_heads=1,
        head_dim=hidden,
        patch_size=side,
        channels_last=True,
        activation="gelu_tanh",
        eps=1e-5,
        table="places",
        table_rows=fields.integer("mm_posemb_size", 1120, most=MAX_WIDTH),
        projector="gemma4_unified",
        projector_eps=fields.number("rms_norm_eps", 1e-6),
    )
    return _gemma4_pictures(files, tower, files.text.raw.get("use_bidirectional_attention", "vision"))


def _gemma4_pictures(files: VisionFiles, tower: TowerConfig, both_directions: object) -> VisionConfig:
    rules, unit = files.processor, tower.patch_size * tower.merge
    most = rules.integer("max_soft_tokens", 280, most=1 << 16)
    if most * tower.merge > tower.table_rows:
        raise rules.error(f"max_soft_tokens {most} is beyond the {tower.table_rows} positions of the tower")
    pixels = pixels_of(files, (0.0,) * 3, (1.0,) * 3, 3)
    if not rules.flag("do_normalize", default=False):
        pixels |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    processor = ImageProcessorConfig(
        kind="gemma4",
        unit=unit,
        most=most * unit**2,
        **pixels,
    )
    image = token_text(files, "image_token", "<|image|>")
    is_bidirectional = both_directions == "vision"
    return VisionConfig(
        family="Gemma 4",
        image_token_id=token_id(files, 258880, "image_token_id"),
        placeholder=image,
        image_text=image,
        start=token_text(files, "boi_token", "<|image>"),
        end=token_text(files, "eoi_token", "<image|>"),
        hidden_size=files.hidden_size,
        pad_id=files.text.integer("pad_token_id", 0),
        is_bidirectional=is_bidirectional,
        bidirectional_windows=is_bidirectional,
        tower=tower,
        processor=processor,
    )
