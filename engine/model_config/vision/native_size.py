"""Families whose images keep their shape: sizes in whole units, within limits of edges, patches or tokens."""

from dataclasses import replace
from typing import Final

from ..fields import MAX_LAYERS, MAX_WIDTH
from .config import HALF, LINEARS, MAX_SIDE, TowerNames, projections
from .fields import (
    MAX_PIXELS,
    MAX_TILES,
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
from .pixel_limits import refuse_other_patches

MISTRAL3: Final = VisionFamily(
    name="Mistral 3",
    names=TowerNames(
        patch="vision_tower.patch_conv",
        layers="vision_tower.transformer.layers",
        pre_norm="vision_tower.ln_pre",
        norms=("attention_norm", "ffn_norm"),
        qkv=projections("attention"),
        output="attention.o_proj",
        mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        projector=("multi_modal_projector.norm", *LINEARS),
    ),
    rules={
        **sizes(1024, 4096, 24, patch=16),
        "num_layers": feature_layer,
        "activation": hidden_act("gelu"),
        "eps": 1e-5,
        "is_rms": True,
        "attention_bias": False,
        "mlp_bias": False,
        "patch_bias": False,
        "rope": "alternating",
        "merge": Key("model.spatial_merge_size", 2, MAX_TILES),
        "projector": "mistral3",
        "projector_bias": Key("model.multimodal_projector_bias", default=False),
        "projector_eps": Key("text.rms_norm_eps", 1e-6),
        "kind": "longest_edge",
        "longest": Key("size.longest_edge|size.height", 1540, MAX_SIDE),
        "image_token_id": image_token(10),
        "image_text": "[IMG]",
        "line_end": "[IMG_BREAK]",
        "end": "[IMG_END]",
    },
)
PIXTRAL: Final = MISTRAL3.but(
    "Pixtral",
    {"projector": ("", *LINEARS)},
    feature_layer=-2,
    merge=1,
    projector="llava",
    projector_bias=Key("model.multimodal_projector_bias", default=True),
    projector_norm=False,
    longest=Key("size.longest_edge|size.height", 1024, MAX_SIDE),
)
"""Pixtral 12B as it was first published: the tower of Mistral 3, each of whose patches is an embedding."""
LIGHTON_OCR: Final = MISTRAL3.but(
    "LightOnOCR",
    image_token_id=image_token(151655),
    image_text=token_text("image_token", "<|image_pad|>"),
    line_end="",
    end="",
)


_KIMI_PATCHES: Final = Key(
    "processor.in_patch_limit|processor.in_token_limit|processor.max_patches", 16384, MAX_PIXELS
)
KIMI_K25: Final = VisionFamily(
    name="Kimi K2.5",
    names=TowerNames(
        patch="vision_tower.patch_embed.proj",
        layers="vision_tower.encoder.blocks",
        table="vision_tower.patch_embed.pos_emb.weight",
        post_norm="vision_tower.encoder.final_layernorm",
        norms=("norm0", "norm1"),
        qkv=("wqkv",),
        output="wo",
        mlp=("mlp.fc0", "mlp.fc1"),
        projector=("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"),
    ),
    rules={
        "hidden_size": Key("hidden_size|vt_hidden_size", 1152, MAX_WIDTH),
        "intermediate_size": Key("intermediate_size|vt_intermediate_size", 4304, 16 * MAX_WIDTH),
        "stored_layers": Key("num_hidden_layers|vt_num_hidden_layers", 27, MAX_LAYERS),
        "num_heads": Key("num_attention_heads|vt_num_attention_heads", 16, MAX_WIDTH),
        "patch_size": Side("patch_size", 14),
        "activation": hidden_act("gelu_pytorch_tanh"),
        "eps": 1e-5,
        "table": "bicubic_square",
        "table_side": Key("pos_emb_height|init_pos_emb_height", 64, MAX_SIDE),
        "table_width": Key("pos_emb_width|init_pos_emb_width", lambda at: at.table_side, MAX_SIDE),
        "table_rows": lambda at: at.table_side**2,
        "rope": "alternating_pairs",
        "merge": Side("merge_kernel_size", 2),
        "projector": "lfm3_vl",
        "projector_size": merged_width,
        "projector_bias": True,
        "projector_eps": Key("model.projection_layer_norm_eps|projector_ln_eps", 1e-5),
        "kind": "padded_units",
        "patch": lambda at: at.patch_size,
        "most_patches": _KIMI_PATCHES,
        "most": lambda at: at.most_patches * at.patch_size**2,
        "patches_across": Key("processor.patch_limit_on_one_side|processor.size.max_height", 512, MAX_SIDE),
        "longest": lambda at: at.patches_across * at.patch_size,
        "usual_pixels": (HALF, HALF, 3),
        "image_token_id": image_token(163605),
        "image_text": token_text("image_token", "<|media_pad|>"),
    },
    only={
        "projection_hidden_size": lambda at: at.hidden_size,
        "processor.pad_input": True,
    },
    refuse={
        "tower: only a square of positions, and heads of a multiple of 4 numbers, are supported": lambda at: (
            at.table_width != at.table_side or at.head_dim % 4
        )
    },
    checks=(refuse_other_patches,),
)
KIMI_VL: Final = KIMI_K25.but(
    "Kimi-VL",
    {"projector": ("multi_modal_projector.pre_norm", *LINEARS)},
    most_patches=replace(_KIMI_PATCHES, default=4096),
)


_TOO_MANY_TOKENS: Final[dict[str, FieldRule]] = {
    "processor: max_soft_tokens {at.most_tokens} is beyond the {at.table_rows} positions "
    "of the tower": lambda at: at.most_tokens * at.merge > at.table_rows
}
GEMMA4: Final = VisionFamily(
    name="Gemma 4",
    names=TowerNames(
        patch="vision_tower.patch_embedder.input_proj",
        layers="vision_tower.encoder.layers",
        table="vision_tower.patch_embedder.position_embedding_table",
        norms=(
            "input_layernorm",
            "pre_feedforward_layernorm",
            "post_attention_layernorm",
            "post_feedforward_layernorm",
        ),
        qkv=tuple(f"{name}.linear" for name in projections("self_attn")),
        output="self_attn.o_proj.linear",
        qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
        mlp=("mlp.gate_proj.linear", "mlp.up_proj.linear", "mlp.down_proj.linear"),
        projector=("", "embed_vision.embedding_projection", ""),
    ),
    rules={
        **sizes(768, 3072, 16, heads=12, patch=16),
        "channels_last": True,
        "activation": hidden_act("gelu_pytorch_tanh", "hidden_activation"),
        "eps": Key("rms_norm_eps", 1e-6),
        "is_rms": True,
        "attention_bias": False,
        "mlp_bias": False,
        "patch_bias": False,
        "scales_queries": False,
        "table": "axes",
        "table_rows": Key("position_embedding_size", 10240, MAX_WIDTH),
        "rope": "axial",
        "usual_theta": 100.0,
        "merge": Key("pooling_kernel_size", 3, MAX_TILES),
        "own_head_dim": Key("tower.head_dim", 64),
        "projector": "gemma4",
        "projector_eps": Key("rms_norm_eps", 1e-6),
        "clips": Key("use_clipped_linears", default=False),
        "standardizes": Key("standardize", default=False),
        "kind": "gemma4",
        "most_tokens": Key("processor.max_soft_tokens", 280, 1 << 16),
        "most": lambda at: at.most_tokens * at.unit**2,
        "usual_pixels": ((0.0,) * 3, (1.0,) * 3, 3),
        "normalizes": False,
        "image_token_id": image_token(258880),
        "image_text": token_text("image_token", "<|image|>"),
        "start": token_text("boi_token", "<|image>"),
        "end": token_text("eoi_token", "<image|>"),
        "pad_id": Key("text.pad_token_id", 0),
        "both_directions": lambda at: at.files.text.raw.get("use_bidirectional_attention"),
        "is_bidirectional": lambda at: at.both_directions == "vision",
        "bidirectional_windows": lambda at: at.is_bidirectional,
    },
    only={"tower.num_key_value_heads": lambda at: at.num_heads},
    refuse={
        "tower: head_dim {at.own_head_dim} is not supported here": lambda at: (
            at.own_head_dim != at.head_dim or at.head_dim % 4
        ),
        **_TOO_MANY_TOKENS,
    },
)


GEMMA4_UNIFIED: Final = replace(
    GEMMA4, only={"tower.output_proj_dims": lambda at: at.hidden_size}, refuse={**_TOO_MANY_TOKENS}
).but(
    "Gemma 4",
    TowerNames(
        patch="vision_embedder.patch_dense",
        layers="",
        patch_norm="vision_embedder.patch_ln1",
        embedded_norm="vision_embedder.patch_ln2",
        table="vision_embedder.pos_embedding",
        pre_norm="vision_embedder.pos_norm",
        projector=("", "embed_vision.embedding_projection", ""),
    ),
    hidden_size=Key("mm_embed_dim", 3840, MAX_WIDTH),
    intermediate_size=lambda at: 3 * at.patch_size**2,
    stored_layers=0,
    num_heads=1,
    refuse={
        "tower: patches of {at.patch_size} x {at.patch_size} pixels are beyond anything known": lambda at: (
            at.patch_size > MAX_SIDE
        )
    },
    pooled=Key("pooling_kernel_size", 3, MAX_TILES),
    side=Side("patch_size", 16),
    patch_size=lambda at: at.side * at.pooled,
    activation="gelu_tanh",
    eps=1e-5,
    is_rms=False,
    attention_bias=True,
    mlp_bias=True,
    patch_bias=True,
    scales_queries=True,
    table="places",
    table_rows=Key("mm_posemb_size", 1120, MAX_WIDTH),
    rope="",
    merge=1,
    projector="gemma4_unified",
    clips=False,
    standardizes=False,
    both_directions=lambda at: at.files.text.raw.get("use_bidirectional_attention", "vision"),
)
"""Gemma 4 12B, which has no tower: norms and two linears make embeddings of patches."""

_RADIO: Final = "vision_model.radio_model.model"
NEMOTRON_OMNI: Final = VisionFamily(
    name="Nemotron Nano Omni",
    names=TowerNames(
        patch=f"{_RADIO}.patch_generator.embedder",
        layers=f"{_RADIO}.blocks",
        class_embedding=f"{_RADIO}.patch_generator.cls_token.token",
        table=f"{_RADIO}.patch_generator.pos_embed",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        may_lack_scales=True,
        projector=("mlp1.0", "mlp1.1", "mlp1.3"),
    ),
    rules={
        **sizes(1280, 0, 32, patch=16, intermediate_size=lambda at: int(at.hidden_size * at.mlp_ratio)),
        "mlp_ratio": Key("mlp_ratio", 4.0),
        "activation": hidden_act("gelu"),
        "patch_bias": False,
        "image_side": Side("max_img_size", 2048),
        "table": "cropped",
        "class_rows": lambda at: at.num_cls + at.num_registers,
        "num_cls": Key("num_cls_tokens", 3, MAX_TILES),
        "num_registers": Key("num_registers", 7, MAX_TILES),
        "merge": Inverse("model.downsample_ratio", 0.5),
        "projector": "pixel_shuffle_mlp",
        "projector_is_rms": True,
        "projector_size": Key("model.projector_hidden_size", 4096, MAX_WIDTH),
        "projector_eps": 1e-5,
        "projector_activation": "relu2",
        "kind": "patch_grid",
        "patch": lambda at: at.patch_size,
        "least_patches": Key("processor.min_num_patches", 1024, MAX_PIXELS),
        "most_patches": Key("processor.max_num_patches", 13312, MAX_PIXELS),
        "context": Key("processor.max_model_len", 16384),
        "least": lambda at: at.least_patches * at.patch_size**2,
        "most": lambda at: (
            max(min((at.context - 4) * at.merge**2, at.most_patches), at.least_patches) * at.patch_size**2
        ),
        "image_token_id": image_token(18),
        "start": "<img>",
        "end": "</img>",
    },
    only={
        "tower.use_swiglu_ffn": False,
        "tower.qkv_bias": True,
        "text.num_nextn_predict_layers": 0,
        "vision_hidden_size|vit_hidden_size": lambda at: at.hidden_size,
        "processor.patch_size": lambda at: at.patch_size,
        "processor.downsample_ratio": lambda at: 1 / at.merge,
    },
    refuse={
        "processor: max_num_patches {at.most_patches} are fewer than those of a token": lambda at: (
            at.most < at.unit**2
        )
    },
)
"""Nemotron 3 Nano Omni: the tower of RADIO, whose rows of classes and registers have no positions."""
