"""Projector file of a GGUF model (mmproj): its vision tower as a checkpoint's config.json describes it.

Keys are those of llama.cpp's tools/mtmd/clip-impl.h. Torch-free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..checkpoint.safetensors import shown
from ..errors import ModelError
from ..model_config.fields import MAX_LAYERS, Fields, show
from ..model_config.vision.families import VISION_FAMILIES, describe_vision
from .projector_tensors import check_projector_tensors
from .reader import GgufFile, read_gguf

CLIP: Final = "clip"
"""Architecture of such files."""


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
    tower |= {"embed_dim": hidden, "mlp_ratio": (inner + 0.5) / hidden, "hidden_size": _width(clip)}
    return tower, {}, clip.pixel_limits(56 * 56, 28 * 28 * 16384)


def _qwen2_5_vl(clip: ClipFields) -> Described:
    tower = clip.qwen_tower()
    every = clip.integer("n_wa_pattern", 8)
    full = list(range(every - 1, tower["depth"], every))
    tower |= {"out_hidden_size": _width(clip), "fullatt_block_indexes": full or [tower["depth"]]}
    tower |= {"window_size": clip.integer("window_size", 112)}
    return tower, {}, clip.pixel_limits(56 * 56, 28 * 28 * 16384)


def _qwen3_vl(clip: ClipFields) -> Described:
    tower = clip.qwen_tower()
    levels = clip.raw.get("is_deepstack_layers") or []
    if not isinstance(levels, list):
        raise clip.error(f"is_deepstack_layers must be a list, not {show(levels)}")
    table = clip.file.tensors.get("v.position_embd.weight")
    tower |= {
        "out_hidden_size": _width(clip),
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


def _width(clip: ClipFields) -> int:
    return clip.integer("projection_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorFamily:
    """Vision-language family by the projector type of its files."""

    name: str
    """Class name in `architectures` of config.json."""
    model_type: str
    text_model_type: str = ""
    """`model_type` of its language model; empty: as of a file of text alone."""
    architectures: tuple[str, ...]
    """Architectures of the files beside it."""
    image_mark: str
    """Token whose rows take embeddings, by its text."""
    describe: Callable[[ClipFields], Described]


PROJECTOR_FAMILIES: Final = {
    "gemma3": ProjectorFamily(
        name="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        architectures=("gemma3",),
        image_mark="<image_soft_token>",
        describe=_gemma3,
    ),
    "gemma4v": ProjectorFamily(
        name="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        architectures=("gemma4",),
        image_mark="<|image|>",
        describe=_gemma4,
    ),
    "gemma4uv": ProjectorFamily(
        name="Gemma4UnifiedForConditionalGeneration",
        model_type="gemma4_unified",
        text_model_type="gemma4_unified_text",
        architectures=("gemma4",),
        image_mark="<|image|>",
        describe=_gemma4_unified,
    ),
    "qwen2vl_merger": ProjectorFamily(
        name="Qwen2VLForConditionalGeneration",
        model_type="qwen2_vl",
        text_model_type="qwen2_vl_text",
        architectures=("qwen2vl",),
        image_mark="<|image_pad|>",
        describe=_qwen2_vl,
    ),
    "qwen2.5vl_merger": ProjectorFamily(
        name="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        text_model_type="qwen2_5_vl_text",
        architectures=("qwen2vl",),
        image_mark="<|image_pad|>",
        describe=_qwen2_5_vl,
    ),
    "qwen3vl_merger": ProjectorFamily(
        name="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        text_model_type="qwen3_vl_text",
        architectures=("qwen3vl", "qwen3vlmoe"),
        image_mark="<|image_pad|>",
        describe=_qwen3_vl,
    ),
    "pixtral": ProjectorFamily(
        name="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        text_model_type="mistral",
        architectures=("llama",),
        image_mark="[IMG]",
        describe=_pixtral,
    ),
    "idefics3": ProjectorFamily(
        name="Idefics3ForConditionalGeneration",
        model_type="idefics3",
        architectures=("llama",),
        image_mark="<image>",
        describe=_idefics3,
    ),
    "lfm2": ProjectorFamily(
        name="Lfm2VlForConditionalGeneration",
        model_type="lfm2_vl",
        text_model_type="lfm2",
        architectures=("lfm2",),
        image_mark="<image>",
        describe=_lfm2,
    ),
}
"""Families by `clip.projector_type`."""
_PIXTRAL_12B: Final = replace(
    PROJECTOR_FAMILIES["pixtral"], name="LlavaForConditionalGeneration", model_type="llava"
)
"""Family of such files without a merger of patches."""
_MOE: Final = {
    "qwen3vlmoe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text"),
}
"""Class, `model_type` and that of the language model, by architectures with experts."""


def read_projector(path: Path) -> GgufFile:
    """Read the header of a projector file. Raises ModelError."""
    return check_projector(read_gguf(path))


def check_projector(file: GgufFile) -> GgufFile:
    """Return the file. Raises ModelError where it is no projector that is read here."""
    if file.architecture != CLIP:
        raise ModelError(
            f"{file.path} is not a projector (mmproj) file: it contains a {file.architecture} model"
        )
    family_of(file)
    return file


def family_of(file: GgufFile) -> ProjectorFamily:
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
    return PROJECTOR_FAMILIES[kind]


def with_vision(
    config: Mapping[str, Any], gguf: GgufFile, projector: GgufFile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json of model and projector together, and preprocessor_config.json.

    `config`: that of the model alone. Raises ModelError for files that are not of one model, and where the
    projector lacks a tensor.
    """
    family, clip = family_of(projector), ClipFields(projector)
    if gguf.architecture not in family.architectures:
        raise ModelError(
            f"{projector.path} is for {' or '.join(family.architectures)}, and {gguf.path.name} is "
            f"{gguf.architecture}: they do not belong to the same model"
        )
    if _width(clip) != config["hidden_size"]:
        raise ModelError(
            f"{projector.path} has embeddings of {_width(clip)} numbers, {gguf.path.name} has "
            f"{config['hidden_size']}: they do not belong to the same model"
        )
    name, model_type, text_type = _MOE.get(
        gguf.architecture, (family.name, family.model_type, family.text_model_type)
    )
    tower, keys, rules = family.describe(clip)
    text = dict(config)
    whole = {key: text.pop(key) for key in ("quantization_config",) if key in text}
    text |= {"model_type": text_type or text["model_type"]}
    if family.model_type.startswith("qwen"):
        text["rope_parameters"] = text["rope_parameters"] | _sections(gguf, family)
    token = _token_id(gguf, projector, family)
    found = {
        "architectures": [name],
        "model_type": model_type,
        **{key: config[key] for key in ("dtype", "tie_word_embeddings") if key in config},
        **keys,
        "image_token_id": token,
        "image_token_index": token,
        "text_config": text,
        "vision_config": tower,
        **whole,
    }
    for key in ("image_mean", "image_std"):
        if values := clip.numbers(key):
            rules[key] = [float(f"{value:.8g}") for value in values]
    where = str(projector.path)
    vision = describe_vision(VISION_FAMILIES[model_type], Fields(found, where), rules, where)
    check_projector_tensors(projector, vision)
    return found, rules


def _sections(gguf: GgufFile, family: ProjectorFamily) -> dict[str, Any]:
    """Return the sections of M-RoPE, of which files have four; without them the family's are taken."""
    sections = gguf.value("rope.dimension_sections")
    known: dict[str, Any] = {"mrope_interleaved": True} if family.model_type.startswith("qwen3") else {}
    if isinstance(sections, list) and len(sections) >= 3:
        known["mrope_section"] = sections[:3]
    return known


def _token_id(gguf: GgufFile, projector: GgufFile, family: ProjectorFamily) -> int:
    words = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(words, list) or family.image_mark not in words:
        raise ModelError(
            f"{projector.path}: the vocabulary of {gguf.path.name} has no {family.image_mark}, which stands "
            "for an image: they do not belong to the same model"
        )
    return words.index(family.image_mark)
