"""Projector file of a GGUF model (mmproj): the vision tower as config.json describes it, and its tensors by a
checkpoint's names. Torch-free.

Names are those of llama.cpp's tools/mtmd/clip-impl.h; what its conversion/ changes is a `ProjectorLayout`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from ..checkpoint.safetensors import shown
from ..errors import ModelError
from ..model_config.fields import Fields
from ..model_config.vision.config import TowerConfig, VisionConfig
from ..model_config.vision.families import describe_vision, list_tower_tensors
from .names import TABLE
from .projector_families import ClipFields, ProjectorFamily, family_of
from .reader import GgufFile, read_gguf

CLIP: Final = "clip"
"""Architecture of such files."""
_INSIDE: Final[Mapping[str, Mapping[str, str]]] = {
    "gemma3": {
        "v.patch_embedding": "v.patch_embd",
        "v.position_embedding": "v.position_embd",
        "v.post_layernorm": "v.post_ln",
        ".layer_norm": ".ln",
        ".attn_output": ".attn_out",
        ".mlp.fc1": ".ffn_up",
        ".mlp.fc2": ".ffn_down",
        "mm.mm_": "mm.",
    },
}
"""Parts of tensors' names in files of Ollama's library, which have the tower inside, and those of a projector
file; by architecture."""


def read_projector(path: Path) -> GgufFile:
    """Read the header of a projector file. Raises ModelError."""
    return check_projector(read_gguf(path))


def check_projector(file: GgufFile) -> GgufFile:
    """Return the file; of a model with a tower inside that tower. Raises ModelError where it is no projector
    that is read here.
    """
    if has_tower(file):
        return _tower_inside(file)
    if file.architecture != CLIP:
        raise ModelError(
            f"{file.path} is not a projector (mmproj) file: it contains a {file.architecture} model"
        )
    family_of(file)
    return file


def has_tower(file: GgufFile) -> bool:
    """Return whether a model's file has its vision tower inside, as those of Ollama's library."""
    return file.architecture in _INSIDE and bool(file.value("vision.block_count"))


def _tower_inside(file: GgufFile) -> GgufFile:
    """Return the tower of such a file as a projector file has it."""
    kind, names = file.architecture, _INSIDE[file.architecture]
    at, metadata = f"{kind}.vision.", dict[str, Any]()
    for key, value in file.metadata.items():
        if key.startswith(at):
            metadata[f"clip.vision.{key.removeprefix(at)}"] = value
    metadata |= {"clip.has_vision_encoder": True, "clip.projector_type": kind, "clip.use_gelu": True}
    metadata["clip.vision.projection_dim"] = file.value("embedding_length")
    across = file.integer("vision.image_size") // file.integer("vision.patch_size")
    rows = round(file.integer("mm.tokens_per_image", 256) ** 0.5)
    metadata["clip.vision.projector.scale_factor"] = max(1, across // rows)
    tensors = {}
    for name, entry in file.tensors.items():
        if name.startswith(("v.", "mm.")):
            for theirs, usual in names.items():
                name = name.replace(theirs, usual)  # noqa: PLW2901
            tensors[name] = entry
    return replace(file, metadata=metadata, tensors=tensors)


def with_vision(
    config: Mapping[str, Any], gguf: GgufFile, projector: GgufFile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json of model and projector together, and preprocessor_config.json.

    `config`: that of the model alone. Raises ModelError for files that are not of one model, and where the
    projector lacks a tensor.
    """
    family, clip = family_of(projector), ClipFields(projector)
    if gguf.architecture not in family.types:
        raise ModelError(
            f"{projector.path} is for {' or '.join(family.types)}, and {gguf.path.name} is "
            f"{gguf.architecture}: they do not belong to the same model"
        )
    if clip.width != config["hidden_size"]:
        raise ModelError(
            f"{projector.path} has embeddings of {clip.width} numbers, {gguf.path.name} has "
            f"{config['hidden_size']}: they do not belong to the same model"
        )
    name, model_type, text_type = family.types[gguf.architecture]
    tower, keys, rules = family.describe(clip)
    text = dict(config)
    whole = {key: text.pop(key) for key in ("quantization_config",) if key in text}
    text |= {"model_type": text_type or text["model_type"]}
    if model_type.startswith(("qwen", "glm")):
        text["rope_parameters"] = text["rope_parameters"] | _sections(gguf, model_type)
    mark, token = _image_token(gguf, projector, family)
    found = {
        "architectures": [name],
        "model_type": model_type,
        **{key: config[key] for key in ("dtype", "tie_word_embeddings") if key in config},
        **keys,
        "image_token_id": token,
        "image_token_index": token,
        "image_token": mark,
        "text_config": text,
        "vision_config": tower,
        **whole,
    }
    for key in ("image_mean", "image_std"):
        if values := clip.numbers(key):
            rules[key] = [float(f"{value:.8g}") for value in values]
    where = str(projector.path)
    vision = describe_vision(model_type, Fields(found, where), rules, where)
    check_projector_tensors(projector, vision)
    return found, rules


def _sections(gguf: GgufFile, model_type: str) -> dict[str, Any]:
    """Return the sections of M-RoPE, of which files have four; without them the family's are taken."""
    sections = gguf.value("rope.dimension_sections")
    known: dict[str, Any] = {"mrope_interleaved": True} if model_type.startswith("qwen3") else {}
    if isinstance(sections, list) and len(sections) >= 3:
        known["mrope_section"] = sections[:3]
    return known


def _image_token(gguf: GgufFile, projector: GgufFile, family: ProjectorFamily) -> tuple[str, int]:
    """Return text and id of the token whose rows take embeddings."""
    words, rows = gguf.metadata.get("tokenizer.ggml.tokens"), gguf.tensors[TABLE].shape[0]
    for mark in family.image_marks:
        if isinstance(words, list) and mark in words[:rows]:
            return mark, words.index(mark)
    raise ModelError(
        f"{projector.path}: the vocabulary of {gguf.path.name} has no {family.image_marks[0]}, which stands "
        "for an image: they do not belong to the same model"
    )


ProjectorLayout = Literal["", "stacked", "frames", "pairs", "adds_one", "colors_first", "axes_first"]
"""Difference from a checkpoint's tensor: none; several tensors are the rows of one; a tensor for each frame
of a patch; RoPE pairs of a head are interleaved; a norm is stored as 1 + w; colors of a patch come before its
pixels; a table of positions has all columns before all rows."""


@dataclass(frozen=True, slots=True)
class ProjectorTensor:
    """Tensors of a file that make up one of the tower's."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: ProjectorLayout = ""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the file."""
        if not self.shape:  # files have no scalars
            return (1,)
        if self.layout == "axes_first":
            return (self.shape[1], self.shape[0], self.shape[2])
        if self.layout == "frames":
            return (self.shape[0], self.shape[1] // len(self.names))
        return (self.shape[0] // len(self.names), *self.shape[1:])


def check_projector_tensors(projector: GgufFile, vision: VisionConfig) -> dict[str, ProjectorTensor]:
    """Return the tensors that make up each tensor of tower and projector, by its name in a checkpoint. Raises
    ModelError for one that is missing or of another shape.
    """
    found = dict(_list_tensors(projector, vision))
    for tensor in found.values():
        for name in tensor.names:
            entry = projector.tensors.get(name)
            if entry is None:
                raise ModelError(
                    f"{projector.path}: tensor {shown(name)} is missing: fetch the file again, or take one "
                    "that a newer llama.cpp has converted"
                )
            wanted, shape = tensor.part_shape, entry.shape
            while len(shape) > len(wanted) and shape[0] == 1:  # of a table for one image
                shape = shape[1:]
            if len(shape) > len(wanted):
                shape = (shape[0], prod(shape[1:])) if len(wanted) == 2 else (prod(shape),)
            if shape != wanted:
                raise ModelError(
                    f"{projector.path}: tensor {shown(name)} has shape {list(entry.shape)}, its metadata ask "
                    f"for {list(wanted)}"
                )
    return found


def _list_tensors(projector: GgufFile, vision: VisionConfig) -> Iterator[tuple[str, ProjectorTensor]]:
    tower = vision.tower
    names = dict((*_tower_names(projector, tower), *_projector_names(tower)))
    for stored, shape in list_tower_tensors(tower, vision.hidden_size).items():
        # Gemma 3 has `mm_input_projection_weight`.
        name = stored.replace("_projection_weight", "_projection.weight")
        linear, _, kind = name.rpartition(".")
        if name in names:  # of no module: its own name says it all
            yield name, ProjectorTensor(names[name], shape, "axes_first" if tower.table == "places" else "")
            continue
        parts, layout = names[linear], _layout(tower, linear, kind)
        if layout == "frames":
            yield (
                name,
                ProjectorTensor(tuple(f"{parts[0]}.weight{number}" for number in ("", ".1")), shape, layout),
            )
        else:
            yield name, ProjectorTensor(tuple(f"{part}.{kind}" for part in parts), shape, layout)


def _layout(tower: TowerConfig, linear: str, kind: str) -> ProjectorLayout:
    names = tower.names
    if linear == names.patch and kind == "weight" and tower.frames == 2:
        return "frames"
    if linear == names.patch and kind == "weight" and tower.channels_last:
        return "colors_first"
    if linear == names.patch_norm:
        return "colors_first"
    if tower.projector in {"mistral3", "llava"} and linear.endswith(names.qkv[:2]):
        return "pairs"
    if tower.projector == "gemma3" and linear == names.projector[0]:
        return "adds_one"
    return "stacked" if linear.endswith(names.qkv) and len(names.qkv) == 1 else ""


def _pair(ours: tuple[str, ...], *theirs: str) -> dict[str, str]:
    return dict(zip(ours, theirs, strict=False))


def _tower_names(projector: GgufFile, tower: TowerConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    names = tower.names
    yield names.patch, ("v.patch_embd",)
    yield names.class_embedding, ("v.class_embd",)
    yield names.table, ("v.position_embd.weight",)
    yield names.patch_norm, ("v.patch_norm.1",)
    yield names.embedded_norm, ("v.norm_embd" if tower.projector == "glm" else "v.patch_norm.2",)
    yield names.pre_norm, ("v.patch_norm.3" if names.patch_norm else "v.pre_ln",)
    yield names.post_norm, ("v.post_ln",)
    up, down = "ffn_up", "ffn_down"
    entry = projector.tensors.get("v.blk.0.ffn_up.weight")
    if entry is not None and entry.shape == (tower.hidden_size, tower.intermediate_size) != entry.shape[::-1]:
        up, down = down, up  # converters before 2025 named them the other way around
    of_layer = {
        # A converter of 2026 gives Llama 4's norm the name that Gemma 4 has for another one.
        **_pair(names.norms, "ln1", "ln2" if "v.blk.0.ln2.weight" in projector.tensors else "attn_post_norm"),
        **_pair(names.norms[2:], "attn_post_norm", "ffn_post_norm"),
        **_pair(names.qk_norms, "attn_q_norm", "attn_k_norm"),
        **_pair(names.qkv if len(names.qkv) > 1 else (), "attn_q", "attn_k", "attn_v"),
        names.output: "attn_out",
        **_pair(names.mlp[-2:], up, down),
        **_pair(names.mlp[:-2], "ffn_gate"),
    }
    for layer in range(tower.num_layers):
        at, there = f"{names.layers}.{layer}.", f"v.blk.{layer}."
        for ours, theirs in of_layer.items():
            yield at + ours, (there + theirs,)
            if ours.endswith(".linear"):  # which clips: its bounds are named by the module around it
                yield at + ours.removesuffix(".linear"), (there + theirs,)
        for ours, theirs in _pair(names.scales, "ls1", "ls2").items():
            yield at + ours, (f"{there}{theirs}.weight",)
        if len(names.qkv) == 1:
            stacked: tuple[str, ...] = (f"{there}attn_qkv",)
            if f"{there}attn_qkv.weight" not in projector.tensors:
                stacked = tuple(f"{there}attn_{part}" for part in "qkv")
            yield at + names.qkv[0], stacked


def _projector_names(tower: TowerConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    norm, first, second = tower.names.projector[:3]
    match tower.projector:
        case "merger":
            theirs = ("v.post_ln", "mm.0", "mm.2")
            for level, layer in enumerate(tower.deepstack):
                modules = tower.names.projector_of(level + 1)
                for module, part in zip(modules, ("norm", "fc1", "fc2"), strict=True):
                    yield module, (f"v.deepstack.{layer}.{part}",)
        case "gemma3":
            theirs = ("mm.soft_emb_norm", "mm.input_projection", "")
        case "gemma4_unified":
            theirs = ("", "mm.input_projection", "")
        case "gemma4":
            theirs = ("", "mm.input_projection", "")
            for each in ("std_bias", "std_scale"):
                yield f"vision_tower.{each}", (f"v.{each}",)
        case "pixel_shuffle":
            theirs = ("", "mm.model.fc", "")
        case "llava":
            theirs = ("", "mm.1", "mm.2")
        case "pixel_shuffle_mlp" if tower.names.class_embedding:  # InternVL
            theirs = ("mm.model.mlp.0", "mm.model.mlp.1", "mm.model.mlp.3")
        case "pixel_shuffle_mlp":
            theirs = ("mm.input_norm", "mm.1", "mm.2")
        case "llama4":
            theirs = ("", "mm.model.mlp.1", "mm.model.mlp.2")
            yield tower.names.projector[3], ("mm.model.fc",)
        case "glm":
            theirs = ("mm.post_norm", "mm.model.fc", "mm.patch_merger")
            for part in ("gate", "up", "down"):
                yield f"visual.merger.{part}_proj", (f"mm.{part}",)
        case _:
            yield "multi_modal_projector.patch_merger.merging_layer", ("mm.patch_merger",)
            theirs = ("mm.input_norm", "mm.1", "mm.2")
    for ours, each in zip((norm, first, second), theirs, strict=True):
        if ours:
            yield ours, (each,)
