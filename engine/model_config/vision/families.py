"""Families whose images are read, by the `model_type` of config.json; their vision parts from files; and the
tensors that a tower and its projector have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from ...checkpoint.files import read_json
from ...checkpoint.index import list_vision_tensors, refuse_undeclared
from ...checkpoint.safetensors import TensorEntry, shown
from ...errors import ModelError
from ..fields import Fields, text_fields, with_text_sizes
from ..shape import VisionShape
from . import MISSING_PARTS, llava, native_size, pixel_limits, tiles
from .config import IMAGE_ROWS, NO_TOWER, SLICE_PATCHES, USUAL_SIDE, TowerConfig, VisionConfig
from .fields import VisionFamily, VisionFields, VisionFiles
from .layout import lay_out_image

VISION_FAMILIES: Final[Mapping[str, VisionFamily | Mapping[str, VisionFamily]]] = {
    "aya_vision": llava.AYA_VISION,
    "cohere2_vision": llava.COHERE2_VISION,
    "cohere_compass": pixel_limits.COHERE_COMPASS,
    "exaone4_5": pixel_limits.EXAONE4_5,
    "gemma3": llava.GEMMA3,
    "gemma4": native_size.GEMMA4,
    "gemma4_unified": native_size.GEMMA4_UNIFIED,
    "glm46v": pixel_limits.GLM4V,
    "glm4v": pixel_limits.GLM4V,
    "glm4v_moe": pixel_limits.GLM4V_MOE,
    "glmga": pixel_limits.GLMGA,
    "glm_ocr": pixel_limits.GLM_OCR,
    "hyperclovax_vision_v2": pixel_limits.HYPERCLOVAX,
    "idefics3": tiles.IDEFICS3,
    "internvl": tiles.INTERNVL,
    "internvl_chat": tiles.INTERNVL_CHAT,
    "kimi_k25": native_size.KIMI_K25,
    "kimi_vl": native_size.KIMI_VL,
    "lfm2_vl": tiles.LFM2_VL,
    "lfm3_vl": pixel_limits.LFM3_VL,
    "lighton_ocr": native_size.LIGHTON_OCR,
    "llama4": tiles.LLAMA4,
    "llava": llava.LLAVA,
    "llava_next": llava.LLAVA_NEXT,
    "llava_next_video": llava.LLAVA_NEXT_VIDEO,
    "llava_onevision": llava.LLAVA_ONEVISION,
    "minicpm_ocr": tiles.MINICPM_OCR,
    "minicpmv4_6": tiles.MINICPMV,
    "mistral3": native_size.MISTRAL3,
    "nemotron_h_omni": native_size.NEMOTRON_OMNI,
    "ovis2": tiles.OVIS2,
    "paddleocr_vl": pixel_limits.PADDLEOCR_VL,
    "qianfan_ocr": tiles.QIANFAN_OCR,
    "qwen2_5_vl": pixel_limits.QWEN2_5_VL,
    "qwen2_5_omni_thinker": pixel_limits.QWEN2_5_OMNI,
    "qwen2_vl": pixel_limits.QWEN2_VL,
    "qwen3_5": pixel_limits.QWEN3_5,
    "qwen3_5_moe": pixel_limits.QWEN3_5,
    "qwen3_omni_moe_thinker": pixel_limits.QWEN3_OMNI,
    "qwen3_vl": pixel_limits.QWEN3_VL,
    "qwen3_vl_moe": pixel_limits.QWEN3_VL,
    "smolvlm": tiles.IDEFICS3,
    "video_llama_3": pixel_limits.VIDEO_LLAMA3,
    "vipllava": llava.VIPLLAVA,
    "vlm": pixel_limits.HYPERCLOVAX,
}
"""Families by `model_type`. Where they have several towers: by the `model_type` of the tower, the first one
if it has none."""
_NESTED: Final = "image_processor"
"""Key of processor_config.json with what preprocessor_config.json has alone."""
_NESTED_RULES: Final = "media_proc_cfg"
"""Key of preprocessor_config.json with the rules of Kimi's own image processor."""
IMAGE_PROBLEM: Final = "llmbox_image_problem"
"""Key of a GGUF file's config.json: why no projector file is read beside it."""


def find_vision(directory: Path) -> tuple[VisionConfig | None, str]:
    """Return the vision part of a model folder, or why images cannot be sent to it: its text works then as
    ever.

    Raises ModelError, with the name of the tensor, for files that do not hold the tower of config.json.
    """
    model = _read(directory, "config.json")
    if (thinker := model.mapping("thinker_config")) is not None:  # the part of a Qwen-Omni that makes text
        model = VisionFields(thinker, f"{model.where}: thinker_config")
    tower, kind = model.raw.get("vision_config"), model.raw.get("model_type")
    if tower is None:
        return None, why_no_tower(model)
    if str(kind) not in VISION_FAMILIES:
        return None, why_not_supported(model)
    try:
        vision = _read_vision(str(kind), _read_files(directory, model))
    except ModelError as error:
        return None, f"its vision tower is not supported: {error}"
    tensors = list_tower_tensors(vision.tower, vision.hidden_size)
    try:
        entries = list_vision_tensors(directory)
    except ModelError:  # loading says why
        return replace(vision, tensors=tensors), ""
    names = vision.tower.names
    if names.may_lack_scales and f"{names.layers}.0.{names.scales[0]}" not in entries:
        vision = replace(vision, tower=replace(vision.tower, names=replace(names, scales=())))
        tensors = list_tower_tensors(vision.tower, vision.hidden_size)
    if not entries.keys() & tensors.keys():
        return None, "its files have no tensors of the vision tower: take a checkpoint that includes it"
    try:
        check_vision_tensors(directory, entries, tensors)
    except ModelError as error:
        if model.raw.get("quantization_config") is None:
            raise
        return None, f"its vision tower is quantized, which is not supported: {error}"
    return replace(vision, tensors=tensors), ""


def why_not_supported(model: Fields) -> str:
    """Return why the tower of a model cannot be used, with the part that is missing."""
    name, kind = next(iter(model.raw.get("architectures") or [""])), model.raw.get("model_type")
    part = MISSING_PARTS.get(str(name))
    needs = f": it needs {part}" if part else ""
    return f"the vision tower of {kind} is not supported{needs}; docs/models.md lists those that are"


def why_no_tower(model: Fields) -> str:
    """Return why a model whose config.json has no tower cannot read images."""
    return model.text(IMAGE_PROBLEM, NO_TOWER)


def _read_vision(model_type: str, files: VisionFiles) -> VisionConfig:
    family = VISION_FAMILIES[model_type]
    if isinstance(family, VisionFamily):
        return family.read(files)
    usual = next(iter(family.values()))
    return family.get(str(files.tower.raw.get("model_type")), usual).read(files)


def describe_vision(model_type: str, model: Fields, rules: Mapping[str, Any], where: str) -> VisionConfig:
    """Return the vision part of a model by the content of its files: config.json, and `rules` of its image
    processor. Raises ModelError.
    """
    empty = Fields({}, where)
    vision = _read_vision(model_type, _files_of(model, where, VisionFields(rules, where), empty))
    return replace(vision, tensors=list_tower_tensors(vision.tower, vision.hidden_size))


def _files_of(model: Fields, tower: str, processor: VisionFields, tokenizer: Fields) -> VisionFiles:
    """`tower`: name of `vision_config` in errors."""
    text = text_fields(model)
    text = with_text_sizes(text, str(text.raw.get("model_type")))
    return VisionFiles(
        model=VisionFields(model.raw, model.where),
        tower=VisionFields(model.mapping("vision_config") or {}, tower),
        processor=processor,
        tokenizer=tokenizer,
        text=VisionFields(text.raw, text.where),
        hidden_size=text.integer("hidden_size"),
    )


def _read_files(directory: Path, model: Fields) -> VisionFiles:
    tokenizer = _read(directory, "tokenizer_config.json")
    return _files_of(model, f"{model.where}: vision_config", _processor(directory), tokenizer)


def _processor(directory: Path) -> VisionFields:
    nested = _read(directory, "processor_config.json")
    if (own := nested.mapping(_NESTED)) is not None:
        return VisionFields(own, f"{nested.where}: {_NESTED}")
    rules = _read(directory, "preprocessor_config.json")
    return VisionFields(rules.mapping(_NESTED_RULES) or rules.raw, rules.where)


def _read(directory: Path, name: str) -> VisionFields:
    """Return the fields of a file; none where it does not exist. Raises ModelError."""
    file = directory / name
    return VisionFields(read_json(file) if file.exists() else {}, str(file))


def vision_shape(vision: VisionConfig) -> VisionShape:
    """Return what memory plans count of a tower."""
    tower, rules, hidden = vision.tower, vision.processor, vision.tower.hidden_size
    usual = lay_out_image(vision, USUAL_SIDE, USUAL_SIDE).num_rows
    limits = (-(-rules.tile // rules.unit)) ** 2, rules.most // rules.unit**2
    # Of Ovis2: numbers for each visual token and row of a tile, also in float32.
    shares = 5 * limits[0] * tower.projector_size if tower.indicators else 0
    canvas = max((tall * wide for tall, wide in rules.canvases), default=0) // rules.unit**2
    return VisionShape(
        params=vision.num_params,
        row=vision.hidden_size * (1 + vision.deepstack_levels),
        patch_numbers=tower.patches_per_row
        * (14 if tower.conv_layers else 7 + 2 * len(tower.joined_layers))
        * hidden,
        row_bytes=tower.patches_per_row
        * ((8 * tower.head_dim if tower.rope else 0) + 6 * tower.patch_size**2),
        tower_rows=min(IMAGE_ROWS, max(limits) or IMAGE_ROWS),
        # Twice the embeddings of a canvas: those of its tiles, and the same in lines.
        slice_numbers=SLICE_PATCHES * max(6 * hidden, 2 * hidden + 3 * tower.intermediate_size)
        + 2 * canvas * vision.hidden_size
        + shares,
        whole_rows=max(usual, rules.most // rules.unit**2) if vision.is_bidirectional else 0,
        usual_rows=usual,
    )


Tensors = Iterator[tuple[str, tuple[int, ...]]]
"""(name, shape); kernels of convolutions are matrices of outputs by everything else."""
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Bounds of a linear that clips."""


def list_tower_tensors(tower: TowerConfig, out: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name. `out`: width of the language model."""
    return dict((*_tower_tensors(tower, out), *_projector_tensors(tower, out)))


def check_vision_tensors(
    directory: Path, entries: Mapping[str, TensorEntry], tensors: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ModelError with the name of a tensor that is missing, quantized or of another shape."""
    for name, shape in tensors.items():
        entry = entries.get(name)
        if entry is None:
            raise ModelError(
                f"{directory}: tensor {shown(name)} of the vision tower is missing; config.json asks for "
                f"{list(shape)}: fetch the model again, or take `vision_config` out of config.json to use "
                "its text alone"
            )
        refuse_undeclared(entry)
        if _flat(entry.shape, len(shape)) != shape:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} has shape {list(entry.shape)}, config.json asks "
                f"for {list(shape)}: config and weights do not belong to the same model"
            )


def _flat(stored: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Return a shape without ones before it, and with a kernel's inputs as one number, in so many dims."""
    while len(stored) > dims and stored[0] == 1:
        stored = stored[1:]
    return (stored[0], prod(stored[1:])) if len(stored) > dims == 2 else stored


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Tensors:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, size: int, *, is_rms: bool) -> Tensors:
    yield f"{name}.weight", (size,)
    if not is_rms:
        yield f"{name}.bias", (size,)


def _tower_tensors(tower: TowerConfig, out: int) -> Tensors:
    names, hidden, rms = tower.names, tower.hidden_size, tower.is_rms
    patch = 3 * tower.frames * tower.patch_size**2
    yield from _linear(names.patch, hidden, patch, bias=tower.patch_bias)
    for norm, size in ((names.patch_norm, patch), (names.embedded_norm, hidden)):
        if norm:
            yield from _norm(norm, size, is_rms=rms)
    if names.class_embedding:
        yield names.class_embedding, (tower.class_rows, hidden) if tower.class_rows > 1 else (hidden,)
    if tower.table:
        rows = tower.table_rows
        side = round(rows**0.5)
        pairs = {
            "places": (rows, 2, hidden),
            "axes": (2, rows, hidden),
            "bicubic_square": (side, side, hidden),
        }
        yield names.table, pairs.get(tower.table, (rows + tower.class_positions, hidden))
    if names.newline:
        yield names.newline, (out,)
    if names.pre_norm:
        yield from _norm(names.pre_norm, hidden, is_rms=rms)
    for number in range(tower.num_layers):
        at = f"{names.layers}.{number}."
        for norm in names.norms:
            yield from _norm(at + norm, hidden, is_rms=rms)
        for factor in names.scales:
            yield at + factor, (hidden,)
        yield from _layer_linears(tower, at, has_conv=number in tower.conv_layers)
        if number not in tower.conv_layers:
            for norm in names.qk_norms:
                yield f"{at}{norm}.weight", (hidden if tower.wide_norms else tower.head_dim,)
    if names.window_merger:
        yield from _window_merger_tensors(tower)
    if names.post_norm and tower.num_layers == tower.stored_layers:
        yield from _norm(names.post_norm, hidden, is_rms=rms)


def _window_merger_tensors(tower: TowerConfig) -> Tensors:
    names, hidden, at = tower.names, tower.hidden_size, f"{tower.names.window_merger}."
    wide, inner = (size * tower.window_merge**2 for size in (hidden, tower.intermediate_size))
    for name in (*names.qkv, names.output):
        yield from _linear(at + name, hidden, hidden, bias=True)
    yield from _norm(at + names.norms[0], hidden, is_rms=False)
    yield from _norm(f"{at}pre_norm", wide, is_rms=False)
    yield from _linear(f"{at}linear_1", inner, wide, bias=True)
    yield from _linear(f"{at}linear_2", hidden, inner, bias=True)


def _layer_linears(tower: TowerConfig, at: str, *, has_conv: bool) -> Tensors:
    names, hidden, inner = tower.names, tower.hidden_size, tower.intermediate_size
    if has_conv:
        module = at + names.conv
        yield from _linear(f"{module}.in_proj", 3 * hidden, hidden, bias=False)
        yield f"{module}.spatial_conv.weight", (hidden, 1, tower.conv_width, tower.conv_width)
        yield from _linear(f"{module}.out_proj", hidden, hidden, bias=False)
    else:
        for name, rows in zip(names.qkv, tower.qkv_rows, strict=True):
            yield from _linear(at + name, rows, hidden, bias=tower.attention_bias)
        yield from _linear(at + names.output, hidden, hidden, bias=tower.output_bias)
    *ups, down = names.mlp
    for name in ups:
        yield from _linear(at + name, inner, hidden, bias=tower.mlp_bias)
    yield from _linear(at + down, hidden, inner, bias=tower.mlp_bias)
    if tower.clips:
        for name in (*names.qkv, names.output, *names.mlp):
            for bound in BOUNDS:
                yield f"{at}{name.removesuffix('.linear')}.{bound}", ()


def _projector_tensors(tower: TowerConfig, out: int) -> Tensors:
    hidden, merged, inner = tower.hidden_size, tower.hidden_size * tower.merge**2, tower.projector_size
    norm, first, second = tower.names.projector[:3]
    bias = tower.projector_bias
    match tower.projector:
        case "mistral3":
            yield from _norm(norm, hidden, is_rms=True)
            yield from _linear("multi_modal_projector.patch_merger.merging_layer", hidden, merged, bias=False)
            yield from _linear(first, inner, hidden, bias=bias)
            yield from _linear(second, out, inner, bias=bias)
        case "gemma3":
            yield from _norm(norm, hidden, is_rms=True)
            yield f"{first}_weight", (hidden, out)
        case "visual_table":
            yield from _linear(first, inner, merged, bias=False)
            yield from _norm(norm, inner, is_rms=False)
            yield f"{second}.weight", (inner + tower.indicators, out)
        case "merger" | "minicpmv" | "lfm3_vl":
            width = merged if tower.projector == "minicpmv" else hidden
            yield from _norm(norm, width, is_rms=tower.projector == "merger" and tower.is_rms)
            yield from _linear(first, inner, merged, bias=bias)
            yield from _linear(second, tower.merger_size or out, inner, bias=bias)
            for third in tower.names.projector[3:]:
                yield from _linear(third, out, tower.merger_size, bias=True)
            for level in range(1, 1 + len(tower.deepstack)):
                norm, first, second = tower.names.projector_of(level)
                yield from _norm(norm, merged, is_rms=False)
                yield from _linear(first, inner, merged, bias=bias)
                yield from _linear(second, out, inner, bias=bias)
        case "glm":
            yield from _linear(second, out, merged, bias=True)
            yield from _linear(first, out, out, bias=False)
            yield from _norm(norm, out, is_rms=False)
            for name in ("gate_proj", "up_proj"):
                yield from _linear(f"visual.merger.{name}", inner, out, bias=False)
            yield from _linear("visual.merger.down_proj", out, inner, bias=False)
        case "gemma4" | "gemma4_unified":
            yield from _linear(first, out, hidden, bias=False)
            if tower.standardizes:
                yield "vision_tower.std_bias", (hidden,)
                yield "vision_tower.std_scale", (hidden,)
        case _:  # a chain of linears over squares of patches
            width = tower.projected_size * tower.merge**2
            if norm and tower.projector_norm:
                yield from _norm(norm, width, is_rms=tower.projector_is_rms)
            linears = [name for name in tower.names.projector[1:] if name]
            for name in linears:
                outputs = out if name == linears[-1] else inner
                yield from _linear(name, outputs, width, bias=bias)
                width = inner // 2 if tower.projector == "pixel_shuffle_gated" else outputs
