"""Families of projector files (mmproj): their metadata as config.json and preprocessor_config.json say them.

Keys are those of llama.cpp's tools/mtmd/clip-impl.h. Torch-free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..checkpoint.safetensors import shown
from ..errors import ModelError
from ..model_config.fields import MAX_LAYERS, Fields, show
from .reader import GgufFile


class ClipFields(Fields):
    """Metadata of a projector file, by keys without `clip.vision.`."""

    def __init__(self, file: GgufFile) -> None:
        at = "clip.vision."
        keys = {key.removeprefix(at): value for key, value in file.metadata.items() if key.startswith(at)}
        super().__init__(keys, f"{file.path}: {at}")
        self.file = file

    @property
    def hidden_size(self) -> int:
        return self.integer("embedding_length")

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP by its tensor: files of Qwen2-VL have another number in their metadata."""
        name = "v.blk.0.ffn_up.weight"
        entry = self.file.tensors.get(name)
        if entry is None or len(entry.shape) != 2:
            raise ModelError(
                f"{self.file.path}: tensor {shown(name)} is missing: the vision tower is incomplete"
            )
        return entry.shape[0] if entry.shape[1] == self.hidden_size else entry.shape[1]

    def activation(self, gelu: str = "gelu_pytorch_tanh") -> str:
        if self.file.metadata.get("clip.use_silu"):
            return "silu"
        return gelu if self.file.metadata.get("clip.use_gelu") else "quick_gelu"

    def tower(self) -> dict[str, Any]:
        """Return the values of `vision_config` under the names that most families have."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.integer("block_count", most=MAX_LAYERS),
            "num_attention_heads": self.integer("attention.head_count"),
            "patch_size": self.integer("patch_size"),
            "image_size": self.integer("image_size"),
            "layer_norm_eps": float(f"{self.number('attention.layer_norm_epsilon', 1e-6):.7g}"),
            "hidden_act": self.activation(),
        }

    def qwen_tower(self) -> dict[str, Any]:
        """Return the values that Qwen's towers have."""
        found = self.tower()
        names = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
        kept = ("hidden_size", "intermediate_size", "patch_size", "hidden_act")
        return {
            **{key: found[key] for key in kept},
            **{ours: found[theirs] for theirs, ours in names.items()},
            "spatial_merge_size": self.integer("spatial_merge_size", 2),
        }

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def rows(self, tensor: str, default: int) -> int:
        """Return the rows of a matrix; the default where it is missing, which a later check reports."""
        entry = self.file.tensors.get(tensor)
        return default if entry is None or len(entry.shape) < 2 else entry.shape[0]

    @property
    def width(self) -> int:
        """Width of the embeddings, that of the language model."""
        return self.integer("projection_dim")

    def pixel_limits(self, least: int, most: int) -> dict[str, int]:
        """Return the limits of an image; files seldom have them, then those of the published models."""
        return {
            "min_pixels": self.integer("image_min_pixels", least),
            "max_pixels": self.integer("image_max_pixels", most),
        }


Described = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""`vision_config`, further keys of config.json, and preprocessor_config.json."""


def _gemma3(clip: ClipFields) -> Described:
    tower = clip.tower()
    across = tower["image_size"] // tower["patch_size"] // clip.integer("projector.scale_factor", 4)
    return tower, {"mm_tokens_per_image": across**2}, {}


def _gemma4(clip: ClipFields) -> Described:
    tower = clip.tower()
    tower |= {
        "hidden_activation": "gelu_pytorch_tanh",  # files do not say it
        "rms_norm_eps": tower.pop("layer_norm_eps"),
        "head_dim": tower["hidden_size"] // tower["num_attention_heads"],
        "num_key_value_heads": tower["num_attention_heads"],
        "pooling_kernel_size": clip.integer("projector.scale_factor", 3),
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in clip.file.tensors,
        "standardize": "v.std_bias" in clip.file.tensors,
    }
    table = clip.file.tensors.get("v.position_embd.weight")
    if table is not None and len(table.shape) == 3:
        tower["position_embedding_size"] = table.shape[1]
    return tower, {}, {}


def _gemma4_unified(clip: ClipFields) -> Described:
    hidden = clip.hidden_size
    tower = {
        "patch_size": clip.integer("patch_size"),
        "pooling_kernel_size": clip.integer("projector.scale_factor", 3),
        "mm_embed_dim": hidden,
        "output_proj_dims": hidden,
        "rms_norm_eps": float(f"{clip.number('attention.layer_norm_epsilon', 1e-6):.7g}"),
    }
    table = clip.file.tensors.get("v.position_embd.weight")
    if table is not None and len(table.shape) == 3:
        tower["mm_posemb_size"] = table.shape[1]
    return tower, {}, {}


def _qwen2_vl(clip: ClipFields) -> Described:
    tower = clip.qwen_tower()
    inner, hidden = tower.pop("intermediate_size"), tower.pop("hidden_size")
    # The half keeps rounding from losing one.
    tower |= {"embed_dim": hidden, "mlp_ratio": (inner + 0.5) / hidden, "hidden_size": clip.width}
    return tower, {}, clip.pixel_limits(56 * 56, 28 * 28 * 16384)


def _qwen2_5_vl(clip: ClipFields) -> Described:
    tower = clip.qwen_tower()
    every = clip.integer("n_wa_pattern", 8)
    full = list(range(every - 1, tower["depth"], every))
    tower |= {"out_hidden_size": clip.width, "fullatt_block_indexes": full or [tower["depth"]]}
    tower |= {"window_size": clip.integer("window_size", 112)}
    return tower, {}, clip.pixel_limits(56 * 56, 28 * 28 * 16384)


def _qwen3_vl(clip: ClipFields) -> Described:
    tower = clip.qwen_tower()
    levels = clip.raw.get("is_deepstack_layers") or []
    if not isinstance(levels, list):
        raise clip.error(f"is_deepstack_layers must be a list, not {show(levels)}")
    table = clip.file.tensors.get("v.position_embd.weight")
    tower |= {
        "out_hidden_size": clip.width,
        "deepstack_visual_indexes": [layer for layer, is_level in enumerate(levels) if is_level],
        "num_position_embeddings": table.shape[0] if table is not None else 2304,
    }
    return tower, {}, clip.pixel_limits(65536, 1 << 24)


def _pixtral(clip: ClipFields) -> Described:
    tower = clip.tower() | {"model_type": "pixtral", "hidden_act": clip.activation("gelu")}
    theta = clip.file.metadata.get("clip.rope.freq_base", clip.raw.get("rope.freq_base"))
    if theta is not None:
        tower["rope_theta"] = theta
    keys = {
        "spatial_merge_size": clip.integer("spatial_merge_size", 1),
        "multimodal_projector_bias": "mm.1.bias" in clip.file.tensors,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    return tower, keys, {"size": {"longest_edge": tower["image_size"]}}


def _idefics3(clip: ClipFields) -> Described:
    tower = clip.tower()
    tile = tower["image_size"]
    longest = clip.integer("preproc_image_size", 4 * tile)
    rules = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    return tower, {"scale_factor": clip.integer("projector.scale_factor", 2)}, rules


def _lfm2(clip: ClipFields) -> Described:
    tensors = clip.file.tensors
    table, first = tensors.get("v.position_embd.weight"), tensors.get("mm.1.weight")
    tower = clip.tower() | ({} if table is None else {"num_patches": table.shape[0]})
    keys = {
        "downsample_factor": clip.integer("projector.scale_factor", 2),
        "projector_bias": "mm.1.bias" in tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in tensors,
    }
    if first is not None:
        keys["projector_hidden_size"] = first.shape[0]
    filters = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
    number = filters.get(clip.text("image_resize_algo", "bilinear"))
    return tower, keys, {} if number is None else {"resample": number}


def _internvl(clip: ClipFields) -> Described:
    first = "v.blk.0."
    tower = clip.tower() | {
        "hidden_act": clip.activation("gelu"),
        "norm_type": "layer_norm" if clip.has(f"{first}ln1.bias") else "rms_norm",
        "attention_bias": clip.has(f"{first}attn_q.bias") or clip.has(f"{first}attn_qkv.bias"),
        "use_qk_norm": clip.has(f"{first}attn_q_norm.weight"),
    }
    rules = {
        "min_patches": clip.integer("preproc_min_tiles", 1),
        "max_patches": clip.integer("preproc_max_tiles", 12),
    }
    return tower, {"downsample_ratio": 1 / clip.integer("projector.scale_factor", 2)}, rules


def _llama4(clip: ClipFields) -> Described:
    inner = clip.rows("mm.model.mlp.1.weight", 4096)
    tower = clip.tower() | {
        "pixel_shuffle_ratio": 1 / clip.integer("projector.scale_factor", 2),
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), inner),
    }
    return tower, {}, {}


def _glm4v(clip: ClipFields) -> Described:
    tower = clip.qwen_tower() | {
        "image_size": clip.integer("image_size"),
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{clip.number('attention.layer_norm_epsilon', 1e-5):.7g}"),
        "attention_bias": clip.has("v.blk.0.attn_qkv.bias"),
        "out_hidden_size": clip.width,
    }
    if clip.has("v.norm_embd.weight"):  # not of GLM-OCR: the merger is as wide as the files say
        tower["intermediate_size"] = clip.rows("mm.up.weight", 13696)
    return tower, {}, clip.pixel_limits(112 * 112, 28 * 28 * 15000)


ModelTypes = tuple[str, str, str]
"""Class name in `architectures` of config.json, `model_type`, and that of the language model; the last is
empty where it is as of a file of text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorFamily:
    """Vision-language family by the projector type of its files."""

    types: Mapping[str, ModelTypes]
    """By the architecture of the file beside it."""
    image_marks: tuple[str, ...]
    """Token whose rows take embeddings, by its text: the first of these that the model has."""
    describe: Callable[[ClipFields], Described]


_GEMMA4_UNIFIED: Final = ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "gemma4_unified_text")
_INTERNVL: Final = ("InternVLForConditionalGeneration", "internvl", "")
_MISTRAL3: Final = ("Mistral3ForConditionalGeneration", "mistral3", "")

PROJECTOR_FAMILIES: Final = {
    "gemma3": ProjectorFamily(
        types={"gemma3": ("Gemma3ForConditionalGeneration", "gemma3", "")},
        image_marks=("<image_soft_token>", "<unused0>"),
        describe=_gemma3,
    ),
    "gemma4v": ProjectorFamily(
        types={"gemma4": ("Gemma4ForConditionalGeneration", "gemma4", "")},
        image_marks=("<|image|>",),
        describe=_gemma4,
    ),
    "gemma4uv": ProjectorFamily(
        types={"gemma4": _GEMMA4_UNIFIED}, image_marks=("<|image|>",), describe=_gemma4_unified
    ),
    "qwen2vl_merger": ProjectorFamily(
        types={"qwen2vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl_text")},
        image_marks=("<|image_pad|>",),
        describe=_qwen2_vl,
    ),
    "qwen2.5vl_merger": ProjectorFamily(
        types={"qwen2vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text")},
        image_marks=("<|image_pad|>",),
        describe=_qwen2_5_vl,
    ),
    "qwen3vl_merger": ProjectorFamily(
        types={
            "qwen3vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text"),
            "qwen3vlmoe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text"),
            "qwen35": ("Qwen3_5ForConditionalGeneration", "qwen3_5", ""),
            "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", ""),
        },
        image_marks=("<|image_pad|>",),
        describe=_qwen3_vl,
    ),
    "glm4v": ProjectorFamily(
        types={
            "glm4": ("Glm4vForConditionalGeneration", "glm4v", "glm4v_text"),
            "glm4moe": ("Glm4vMoeForConditionalGeneration", "glm4v_moe", "glm4v_moe_text"),
        },
        image_marks=("<|image|>",),
        describe=_glm4v,
    ),
    "pixtral": ProjectorFamily(
        types={
            "llama": ("Mistral3ForConditionalGeneration", "mistral3", "mistral"),
            "mistral3": _MISTRAL3,
            "mistral4": _MISTRAL3,
        },
        image_marks=("[IMG]",),
        describe=_pixtral,
    ),
    "lightonocr": ProjectorFamily(
        types={"qwen3": ("LightOnOcrForConditionalGeneration", "lighton_ocr", "qwen3")},
        image_marks=("<|image_pad|>",),
        describe=_pixtral,
    ),
    "internvl": ProjectorFamily(
        types=dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "llama", "gpt-oss"), _INTERNVL),
        image_marks=("<IMG_CONTEXT>",),
        describe=_internvl,
    ),
    "llama4": ProjectorFamily(
        types={"llama4": ("Llama4ForConditionalGeneration", "llama4", "llama4_text")},
        image_marks=("<|patch|>",),
        describe=_llama4,
    ),
    "idefics3": ProjectorFamily(
        types={"llama": ("Idefics3ForConditionalGeneration", "idefics3", "")},
        image_marks=("<image>",),
        describe=_idefics3,
    ),
    "lfm2": ProjectorFamily(
        types={"lfm2": ("Lfm2VlForConditionalGeneration", "lfm2_vl", "lfm2")},
        image_marks=("<image>",),
        describe=_lfm2,
    ),
}
"""Families by `clip.projector_type`."""
_PIXTRAL_12B: Final = replace(
    PROJECTOR_FAMILIES["pixtral"], types={"llama": ("LlavaForConditionalGeneration", "llava", "mistral")}
)
"""Family of such files without a merger of patches."""
_GLM_OCR: Final = replace(
    PROJECTOR_FAMILIES["glm4v"], types={"glm4": ("GlmOcrForConditionalGeneration", "glm_ocr", "glm_ocr_text")}
)
"""Family of such files whose queries and keys are normalized."""


def family_of(file: GgufFile) -> ProjectorFamily:
    """Look up the family of a projector file. Raises ModelError."""
    kind = file.metadata.get("clip.vision.projector_type", file.metadata.get("clip.projector_type"))
    kind = kind if isinstance(kind, str) else show(kind)
    if file.metadata.get("clip.has_vision_encoder") is not True and kind not in PROJECTOR_FAMILIES:
        raise ModelError(f"{file.path} has no vision tower")
    if kind not in PROJECTOR_FAMILIES:
        raise ModelError(
            f"{file.path}: projector {kind[:80]!r} is not supported; supported: "
            f"{', '.join(PROJECTOR_FAMILIES)}"
        )
    if kind == "pixtral" and "mm.patch_merger.weight" not in file.tensors:
        return _PIXTRAL_12B
    if kind == "glm4v" and "v.blk.0.attn_q_norm.weight" in file.tensors:
        return _GLM_OCR
    return PROJECTOR_FAMILIES[kind]
