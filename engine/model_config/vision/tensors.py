"""Tensors that a vision tower and its projector have, and the check that the files hold them."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from ...checkpoint.index import refuse_undeclared
from ...checkpoint.safetensors import TensorEntry, shown
from ...errors import ModelError
from .config import TowerConfig

Tensors = Iterator[tuple[str, tuple[int, ...]]]
"""(name, shape); kernels of convolutions are matrices of outputs by everything else."""
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Bounds of a linear that clips."""


def list_tower_tensors(tower: TowerConfig, out: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name. `out`: width of the language model."""
    return dict((*_tower_tensors(tower), *_projector_tensors(tower, out)))


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
        stored = entry.shape
        if len(stored) > 2 and len(shape) == 2:
            stored = (stored[0], prod(stored[1:]))
        if stored != shape:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} has shape {list(entry.shape)}, config.json asks "
                f"for {list(shape)}: config and weights are not of the same model"
            )


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Tensors:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, size: int, *, is_rms: bool) -> Tensors:
    yield f"{name}.weight", (size,)
    if not is_rms:
        yield f"{name}.bias", (size,)


def _tower_tensors(tower: TowerConfig) -> Tensors:
    names, hidden, rms = tower.names, tower.hidden_size, tower.is_rms
    patch = 3 * tower.frames * tower.patch_size**2
    yield from _linear(names.patch, hidden, patch, bias=tower.patch_bias)
    for norm, size in ((names.patch_norm, patch), (names.embedded_norm, hidden)):
        if norm:
            yield from _norm(norm, size, is_rms=rms)
    if tower.table == "places":
        yield names.table, (tower.table_rows, 2, hidden)
    elif tower.table == "axes":
        yield names.table, (2, tower.table_rows, hidden)
    elif tower.table:
        yield f"{names.table}.weight", (tower.table_rows, hidden)
    if names.pre_norm:
        yield from _norm(names.pre_norm, hidden, is_rms=rms)
    for number in range(tower.num_layers):
        at = f"{names.layers}.{number}."
        for norm in (names.norm1, names.norm2, names.after_attention, names.after_mlp):
            if norm:
                yield from _norm(at + norm, hidden, is_rms=rms)
        yield from _layer_linears(tower, at, has_conv=number in tower.conv_layers)
        for norm in (names.query_norm, names.key_norm):
            if norm and number not in tower.conv_layers:
                yield f"{at}{norm}.weight", (tower.head_dim,)
    if names.post_norm and tower.num_layers == tower.stored_layers:
        yield from _norm(names.post_norm, hidden, is_rms=rms)


def _layer_linears(tower: TowerConfig, at: str, *, has_conv: bool) -> Tensors:
    names, hidden, inner = tower.names, tower.hidden_size, tower.intermediate_size
    attention: list[str] = []
    if has_conv:
        module = at + names.conv
        yield from _linear(f"{module}.in_proj", 3 * hidden, hidden, bias=False)
        yield f"{module}.spatial_conv.weight", (hidden, 1, tower.conv_width, tower.conv_width)
        yield from _linear(f"{module}.out_proj", hidden, hidden, bias=False)
    else:
        if names.stacked:
            yield from _linear(at + names.stacked, 3 * hidden, hidden, bias=tower.attention_bias)
        else:
            attention = [names.query, names.key, names.value]
        for name, heads in zip(attention, tower.head_counts, strict=False):
            yield from _linear(at + name, heads * tower.head_dim, hidden, bias=tower.attention_bias)
        yield from _linear(at + names.output, hidden, hidden, bias=tower.attention_bias)
    ups = [name for name in (names.gate, names.up) if name]
    for name in ups:
        yield from _linear(at + name, inner, hidden, bias=tower.mlp_bias)
    yield from _linear(at + names.down, hidden, inner, bias=tower.mlp_bias)
    if tower.clips:
        for name in (*attention, names.output, *ups, names.down):
            for bound in BOUNDS:
                yield f"{at}{name.removesuffix('.linear')}.{bound}", ()


def _projector_tensors(tower: TowerConfig, out: int) -> Tensors:
    hidden, merged, inner = tower.hidden_size, tower.hidden_size * tower.merge**2, tower.projector_size
    norm, first, second = tower.names.projector
    bias = tower.projector_bias
    match tower.projector:
        case "mistral3":
            yield from _norm(norm, hidden, is_rms=True)
            yield from _linear("multi_modal_projector.patch_merger.merging_layer", hidden, merged, bias=False)
            yield from _linear(first, inner, hidden, bias=bias)
            yield from _linear(second, out, inner, bias=bias)
        case "llava":
            yield from _linear(first, inner, hidden, bias=bias)
            yield from _linear(second, out, inner, bias=bias)
        case "pixel_shuffle":
            yield from _linear(first, out, merged, bias=False)
        case "gemma3":
            yield from _norm(norm, hidden, is_rms=True)
            yield f"{first}_weight", (hidden, out)
        case "lfm2_vl":
            if tower.projector_norm:
                yield from _norm(norm, merged, is_rms=False)
            yield from _linear(first, inner, merged, bias=bias)
            yield from _linear(second, out, inner, bias=bias)
        case "merger":
            yield from _norm(norm, hidden, is_rms=tower.is_rms)
            yield from _linear(first, merged, merged, bias=True)
            yield from _linear(second, out, merged, bias=True)
            for level in range(len(tower.deepstack)):
                at = f"visual.deepstack_merger_list.{level}."
                yield from _norm(f"{at}norm", merged, is_rms=False)
                yield from _linear(f"{at}linear_fc1", merged, merged, bias=True)
                yield from _linear(f"{at}linear_fc2", out, merged, bias=True)
        case "lfm3_vl":
            yield from _norm(norm, hidden, is_rms=False)
            yield from _linear(first, inner, merged, bias=bias)
            yield from _linear(second, out, inner, bias=bias)
        case "glm_ocr":
            yield from _linear(second, out, merged, bias=True)
            yield from _linear(first, out, out, bias=False)
            yield from _norm(norm, out, is_rms=False)
            for name in ("gate_proj", "up_proj"):
                yield from _linear(f"visual.merger.{name}", 3 * out, out, bias=False)
            yield from _linear("visual.merger.down_proj", out, 3 * out, bias=False)
        case "gemma4" | "gemma4_unified":
            yield from _linear(first, out, hidden, bias=False)
            if tower.standardizes:
                yield "vision_tower.std_bias", (hidden,)
                yield "vision_tower.std_scale", (hidden,)
