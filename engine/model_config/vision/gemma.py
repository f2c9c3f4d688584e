"""Families of Gemma: rows of an image may attend to each other in both directions."""

from typing import Any, Final

from ..fields import MAX_WIDTH
from .config import HALF, MAX_SIDE, ImageProcessorConfig, TowerConfig, TowerNames, VisionConfig
from .fields import VisionFiles

_GEMMA3_PROJECTION: Final = "multi_modal_projector.mm_input_projection"


def gemma3(files: VisionFiles) -> VisionConfig:
    fields, rules = files.tower, files.processor
    sizes = fields.sizes(width=768, inner=3072, layers=12, heads=12, patch=16)
    image_side = fields.side("image_size", 224)
    side = image_side // sizes["patch_size"]
    count = files.model.integer("mm_tokens_per_image", 256, most=1 << 16)
    across = round(count**0.5)
    if across**2 != count or across > side:
        raise files.model.error(f"mm_tokens_per_image {count} is no square of at most {side} rows")
    if side % across:
        raise files.model.error(f"mm_tokens_per_image {count} does not divide the {side} x {side} patches")
    if rules.side("size", image_side) != image_side:
        raise rules.error(f"size must be that of the tower, {image_side}")
    tower = TowerConfig(
        **sizes,
        names=TowerNames.siglip(
            "vision_tower.", "multi_modal_projector.mm_soft_emb_norm", _GEMMA3_PROJECTION, ""
        ),
        activation=fields.activation("gelu_pytorch_tanh"),
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
        kind="square", unit=image_side // across, tile=image_side, **crops, **files.pixels(HALF, HALF, 2)
    )
    start, image = files.token_text("boi_token", "<start_of_image>"), "<image_soft_token>"
    return files.config(
        tower,
        processor,
        family="Gemma 3",
        image_token_id=files.image_token(262144, "image_token_index", "image_token_id"),
        placeholder=start,
        image_text=files.token_text("image_token", image),
        start=f"\n\n{start}",
        end=f"{files.token_text('eoi_token', '<end_of_image>')}\n\n",
        is_bidirectional=True,
    )


_GEMMA4_GATED: Final = {
    "gate": "mlp.gate_proj.linear",
    "up": "mlp.up_proj.linear",
    "down": "mlp.down_proj.linear",
}


def gemma4(files: VisionFiles) -> VisionConfig:
    fields = files.tower
    sizes = fields.sizes(width=768, inner=3072, layers=16, heads=12, patch=16)
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
        activation=fields.activation("gelu_pytorch_tanh", "hidden_activation"),
        eps=fields.number("rms_norm_eps", 1e-6),
        is_rms=True,
        attention_bias=False,
        mlp_bias=False,
        patch_bias=False,
        scales_queries=False,
        table="axes",
        table_rows=fields.integer("position_embedding_size", 10240, most=MAX_WIDTH),
        rope="axial",
        rope_theta=fields.rope_theta(100.0),
        merge=merge,
        projector="gemma4",
        projector_eps=fields.number("rms_norm_eps", 1e-6),
        clips=fields.flag("use_clipped_linears", default=False),
        standardizes=fields.flag("standardize", default=False),
    )
    return _gemma4_images(files, tower, files.text.raw.get("use_bidirectional_attention"))


def gemma4_unified(files: VisionFiles) -> VisionConfig:
    """Read Gemma 4 12B, which has no tower: norms and two linears make embeddings of patches."""
    fields = files.tower
    hidden = fields.integer("mm_embed_dim", 3840, most=MAX_WIDTH)
    if fields.integer("output_proj_dims", hidden) != hidden:
        raise fields.error("output_proj_dims other than mm_embed_dim is not supported")
    side = fields.side("patch_size", 16) * fields.integer("pooling_kernel_size", 3, most=64)
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
    return _gemma4_images(files, tower, files.text.raw.get("use_bidirectional_attention", "vision"))


def _gemma4_images(files: VisionFiles, tower: TowerConfig, both_directions: object) -> VisionConfig:
    rules, unit = files.processor, tower.patch_size * tower.merge
    most = rules.integer("max_soft_tokens", 280, most=1 << 16)
    if most * tower.merge > tower.table_rows:
        raise rules.error(f"max_soft_tokens {most} is beyond the {tower.table_rows} positions of the tower")
    pixels = files.pixels((0.0,) * 3, (1.0,) * 3, 3)
    if not rules.flag("do_normalize", default=False):
        pixels |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    processor = ImageProcessorConfig(
        kind="gemma4",
        unit=unit,
        most=most * unit**2,
        **pixels,
    )
    image = files.token_text("image_token", "<|image|>")
    is_bidirectional = both_directions == "vision"
    return files.config(
        tower,
        processor,
        family="Gemma 4",
        image_token_id=files.image_token(258880, "image_token_id"),
        placeholder=image,
        image_text=image,
        start=files.token_text("boi_token", "<|image>"),
        end=files.token_text("eoi_token", "<image|>"),
        pad_id=files.text.integer("pad_token_id", 0),
        is_bidirectional=is_bidirectional,
        bidirectional_windows=is_bidirectional,
    )
