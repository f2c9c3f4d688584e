"""Vision encoder: a tower and its projector, from prepared images to rows of embeddings.

P patches of a tile, R rows of one image, M patches merged into one row, L = 1 + deepstack levels. E hidden:
of the tower in projectors, of the language model in their results.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from llmbox.kernels.ops import Ops

from ..checkpoint.index import list_vision_tensors
from ..checkpoint.safetensors import TensorEntry
from ..gguf.folder import projector_of
from ..ipc.messages import PreparedImage
from ..model_config.vision.config import ProjectorKind, VisionConfig
from ..model_config.vision.families import check_vision_tensors
from ..model_config.vision.layout import grid_of
from ..weights.checkpoint import Checkpoint
from ..weights.gguf_source import ProjectorSource
from .layers import TowerNorm, TowerWeights, activate, gate
from .tower import VisionTower

Projector = Callable[[Tensor, tuple[int, int], int], Tensor]
"""(states [P, E], rows and columns of patches, 0 or the deepstack level of the states) -> embeddings of a
tile [R, hidden size of the language model]."""


def merge_squares(x_PE: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """Return the squares of patches that stand line by line, [R, side * side, E]."""
    rows, columns = grid
    squares = x_PE.view(rows // side, side, columns // side, side, -1).transpose(1, 2)
    return squares.reshape(-1, side * side, x_PE.shape[1])


class Mistral3Projector:
    """Norm, a linear over squares of patches, and two linears."""

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.ops, self.tower, tower = weights.ops, vision.tower, vision.tower
        hidden, inner, bias = tower.hidden_size, tower.projector_size, tower.projector_bias
        norm, first, second = tower.names.projector
        self.norm = TowerNorm(weights, norm, hidden, tower.projector_eps, is_rms=True)
        merger = "multi_modal_projector.patch_merger.merging_layer"
        self.merge = weights.linear((merger,), hidden, hidden * tower.merge**2, bias=False)
        self.first = weights.linear((first,), inner, hidden, bias=bias)
        self.second = weights.linear((second,), vision.hidden_size, inner, bias=bias)

    def __call__(self, x_PE: Tensor, grid: tuple[int, int], _level: int) -> Tensor:
        squares_RME = merge_squares(self.norm(x_PE), grid, self.tower.merge)
        merged = self.ops.linear(self.merge, squares_RME.transpose(1, 2).flatten(1))
        inner = activate(self.tower.projector_activation, self.ops.linear(self.first, merged))
        return self.ops.linear(self.second, inner)


class PixelShuffle:
    """One to three linears over squares of patches (Idefics3, LFM2-VL, InternVL, Llama 4), or over each
    (LLaVA). The first has a gate in its second half in Aya Vision and Command A Vision.
    """

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.ops, self.tower, tower = weights.ops, vision.tower, vision.tower
        width, bias = tower.projected_size * tower.merge**2, tower.projector_bias
        norm, *linears = tower.names.projector
        self.norm = None
        if norm and tower.projector_norm:
            self.norm = TowerNorm(weights, norm, width, tower.projector_eps, is_rms=tower.projector_is_rms)
        self.is_gated = tower.projector == "pixel_shuffle_gated"
        self.linears, names = [], [name for name in linears if name]
        for number, name in enumerate(names, 1):
            is_last = number == len(names)
            outputs, half = vision.hidden_size if is_last else tower.projector_size, tower.projector_size // 2
            order = (*range(half, outputs), *range(half)) if self.is_gated and not is_last else None
            self.linears.append(weights.linear((name,), outputs, width, bias=bias, order=order))
            width = half if self.is_gated else outputs

    def __call__(self, x_PE: Tensor, grid: tuple[int, int], _level: int) -> Tensor:
        rows = merge_squares(x_PE, grid, self.tower.merge).flatten(1)
        rows = self.ops.linear(self.linears[0], rows if self.norm is None else self.norm(rows))
        activation = self.tower.projector_activation
        for linear in self.linears[1:]:
            inner = gate(self.ops, activation, rows) if self.is_gated else activate(activation, rows)
            rows = self.ops.linear(linear, inner)
        return rows


class GemmaProjector:
    """Mean of squares of patches (not of Gemma 4 12B, whose patches are large), a norm, and a linear."""

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.ops, self.tower, tower = weights.ops, vision.tower, vision.tower
        hidden, out = tower.hidden_size, vision.hidden_size
        norm, first, _ = tower.names.projector
        if norm:
            self.norm = TowerNorm(weights, norm, hidden, tower.projector_eps, is_rms=True, adds_one=True)
            self.first = weights.linear((first,), hidden, out, bias=False, transposed=True)
        else:
            self.weight_E = torch.ones(hidden, dtype=weights.dtype, device=weights.device)
            self.first = weights.linear((first,), out, hidden, bias=False)
        self.standard = None
        if tower.standardizes:
            names = ("vision_tower.std_bias", "vision_tower.std_scale")
            self.standard = tuple(weights.floats(name, hidden) for name in names)

    def __call__(self, x_PE: Tensor, grid: tuple[int, int], _level: int) -> Tensor:
        tower = self.tower
        if tower.projector == "gemma4_unified":
            return self.ops.linear(self.first, self.ops.rms_norm(x_PE, self.weight_E, tower.projector_eps))
        rows_RE = merge_squares(x_PE, grid, tower.merge).float().mean(1).to(x_PE.dtype)
        if tower.projector == "gemma3":
            return self.ops.linear(self.first, self.norm(rows_RE))
        scaled = rows_RE.float() * tower.hidden_size**0.5
        if self.standard is not None:
            scaled = (scaled - self.standard[0]) * self.standard[1]
        normed = self.ops.rms_norm(scaled.to(x_PE.dtype), self.weight_E, tower.projector_eps)
        return self.ops.linear(self.first, normed)


class PatchMerger:
    """Norm and two linears over merged patches (Qwen, LFM3-VL, MiniCPM-V), once more a deepstack level, or a
    third linear (HyperCLOVA X).
    """

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.ops, self.tower, tower = weights.ops, vision.tower, vision.tower
        hidden, self.merged, out = tower.hidden_size, tower.hidden_size * tower.merge**2, vision.hidden_size
        is_qwen = tower.projector == "merger"
        inner, bias = tower.projector_size, tower.projector_bias
        self.norms_merged = tower.projector == "minicpmv"
        width = self.merged if self.norms_merged else hidden
        own, last = tower.names.projector[:3], tower.names.projector[3:]
        self.last = weights.linear(last, out, tower.merger_size, bias=True) if last else None
        out = tower.merger_size or out
        names = [(own, width, is_qwen and tower.is_rms)]
        levels = range(1, 1 + len(tower.deepstack))
        names += [(tower.names.projector_of(level), self.merged, False) for level in levels]
        self.levels = [
            (
                TowerNorm(weights, norm, width, tower.projector_eps, is_rms=is_rms),
                weights.linear((first,), inner, self.merged, bias=bias),
                weights.linear((second,), out, inner, bias=bias),
            )
            for (norm, first, second), width, is_rms in names
        ]

    def __call__(self, x_PE: Tensor, _grid: tuple[int, int], level: int) -> Tensor:
        norm, first, second = self.levels[level]
        rows = norm(x_PE.reshape(-1, self.merged) if level or self.norms_merged else x_PE).reshape(
            -1, self.merged
        )
        inner = activate(self.tower.projector_activation, self.ops.linear(first, rows))
        merged = self.ops.linear(second, inner)
        return merged if self.last is None else self.ops.linear(self.last, merged)


class GlmProjector:
    """Convolution over merged patches, a linear with a norm, and a gated MLP."""

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.ops, self.tower, tower, out = weights.ops, vision.tower, vision.tower, vision.hidden_size
        norm, first, down = tower.names.projector
        self.downsample = weights.linear((down,), out, tower.hidden_size * tower.merge**2, bias=True)
        self.first = weights.linear((first,), out, out, bias=False)
        self.norm = TowerNorm(weights, norm, out, tower.projector_eps, is_rms=False)
        ups = ("visual.merger.gate_proj", "visual.merger.up_proj")
        inner = vision.tower.projector_size
        self.up = weights.linear(ups, inner, out, bias=False)
        self.down = weights.linear(("visual.merger.down_proj",), out, inner, bias=False)

    def __call__(self, x_PE: Tensor, _grid: tuple[int, int], _level: int) -> Tensor:
        ops, unit = self.ops, self.tower.merge**2
        squares_REM = x_PE.view(-1, unit, x_PE.shape[1]).transpose(1, 2)
        rows = ops.linear(self.downsample, squares_REM.flatten(1))
        rows = activate("gelu", self.norm(ops.linear(self.first, rows)))
        return ops.linear(self.down, gate(ops, self.tower.projector_activation, ops.linear(self.up, rows)))


class VisualTable:
    """Shares of visual tokens for squares of patches, and the mean of their embeddings (Ovis2)."""

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.ops, self.tower, tower = weights.ops, vision.tower, vision.tower
        (norm, first, table), inner = tower.names.projector, tower.projector_size
        self.first = weights.linear((first,), inner, tower.hidden_size * tower.merge**2, bias=False)
        self.norm = TowerNorm(weights, norm, inner, tower.projector_eps, is_rms=False)
        shape = (inner + tower.indicators, vision.hidden_size)
        self.table = weights.linear((table,), *shape, bias=False, transposed=True)
        last = torch.eye(shape[0], dtype=weights.dtype, device=weights.device)[inner:]
        self.indicators_5E = self.ops.linear(self.table, last)

    def __call__(self, x_PE: Tensor, grid: tuple[int, int], _level: int) -> Tensor:
        logits = self.norm(
            self.ops.linear(self.first, merge_squares(x_PE, grid, self.tower.merge).flatten(1))
        )
        shares = logits.float().softmax(1).to(x_PE.dtype)
        return self.ops.linear(self.table, torch_functional.pad(shares, (0, self.tower.indicators)))


PROJECTORS: Final[dict[ProjectorKind, Callable[[VisionConfig, TowerWeights], Projector]]] = {
    "mistral3": Mistral3Projector,
    "llava": PixelShuffle,
    "pixel_shuffle": PixelShuffle,
    "pixel_shuffle_mlp": PixelShuffle,
    "pixel_shuffle_gated": PixelShuffle,
    "llama4": PixelShuffle,
    "gemma3": GemmaProjector,
    "gemma4": GemmaProjector,
    "gemma4_unified": GemmaProjector,
    "merger": PatchMerger,
    "lfm3_vl": PatchMerger,
    "minicpmv": PatchMerger,
    "glm": GlmProjector,
    "visual_table": VisualTable,
}

CPU = torch.device("cpu")
SHRUNK_NUMBERS: Final = 128
"""Numbers of each embedding that are shrunk at once."""


class VisionEncoder:
    """Tower and projector of one model. Weights are unquantized, in the model's dtype."""

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.vision = vision
        self._tower = VisionTower(vision.tower, vision.processor, weights)
        self._projector: Projector = PROJECTORS[vision.tower.projector](vision, weights)
        newline = vision.tower.names.newline
        self._newline_E = weights.vector(newline, vision.hidden_size) if newline else None

    @torch.inference_mode()
    def encode(self, image: PreparedImage) -> Generator[None, None, Tensor]:
        """Encode one image, and yield wherever the step loop may run a step.

        Returns [L, R, E] in the model's dtype: the rows that stand for token embeddings, then those of each
        deepstack level. They are a function of the image alone.
        """
        tiles: list[Tensor] = []
        start = 0
        for height, width in image.tiles:
            size = 3 * height * width
            pixels = torch.frombuffer(bytearray(image.pixels[start : start + size]), dtype=torch.uint8)
            start += size
            tiles.append((yield from self._tower.run(pixels.view(height, width, 3), self._projector)))
        if isinstance(self._projector, VisualTable):
            levels = self._between_tiles(tiles, self._projector.indicators_5E, image.size)
        else:
            levels = torch.cat(tiles, 1) if self._newline_E is None else self._in_lines(tiles, image.size)
        return levels if self.vision.embedding_scale == 1.0 else levels * self.vision.embedding_scale

    def _between_tiles(self, tiles: list[Tensor], marks_5E: Tensor, size: tuple[int, int]) -> Tensor:
        """Return rows with an embedding before and after the whole image, between tiles, and at the end."""
        begin, after_whole, column, row, end = marks_5E.view(5, 1, 1, -1)
        parts = [begin, tiles[0], after_whole]
        columns = grid_of(self.vision.processor, *size)[1] if len(tiles) > 1 else 1
        for number, tile_1RE in enumerate(tiles[1:]):
            if number:
                parts.append(column if number % columns else row)
            parts.append(tile_1RE)
        return torch.cat([*parts, end], 1)

    def _in_lines(self, tiles: list[Tensor], size: tuple[int, int]) -> Tensor:
        """Return the rows of the whole image and then those of its canvas line by line, without those of
        its padding, and with an embedding that ends each line (LLaVA-NeXT). `size`: width and height.
        """
        assert self._newline_E is not None
        whole_1RE, *tiles = tiles
        newline_11E = self._newline_E.view(1, 1, -1)
        if not tiles:
            return torch.cat([whole_1RE, newline_11E], 1)
        rules = self.vision.processor
        side, across = rules.tile // rules.unit, rules.canvas_of(*size)[1] // rules.tile
        tiles_YXRCE = torch.cat(tiles).view(-1, across, side, side, whole_1RE.shape[2])
        canvas_YXE = tiles_YXRCE.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        (rows, columns), kept = rules.canvas_patches(*size)
        top, left = (canvas_YXE.shape[0] - rows) // 2, (canvas_YXE.shape[1] - columns) // 2
        inner_YXE = canvas_YXE[top : top + rows, left : left + columns]
        if kept != (rows, columns):
            inner_YXE = shrink(inner_YXE, kept)
        lines = torch.cat([inner_YXE, newline_11E.expand(kept[0], 1, -1)], 1)
        return torch.cat([whole_1RE, lines.flatten(0, 1).unsqueeze(0)], 1)


def shrink(x_YXE: Tensor, size: tuple[int, int]) -> Tensor:
    """Return so many rows and columns by bilinear means; in float32, so a part of the numbers at once."""
    parts = []
    for part in torch.split(x_YXE, SHRUNK_NUMBERS, dim=2):
        plane_1EYX = part.permute(2, 0, 1).unsqueeze(0).float()
        parts.append(torch_functional.interpolate(plane_1EYX, size=size, mode="bilinear")[0].to(part.dtype))
    return torch.cat(parts).permute(1, 2, 0)


def load_vision_encoder(
    vision: VisionConfig, directory: Path, ops: Ops, dtype: torch.dtype, device: torch.device = CPU
) -> VisionEncoder:
    """Load tower and projector from the checkpoint's files, or from a projector file. Raises ModelError."""
    if (projector := projector_of(directory)) is not None:
        found = ProjectorSource(projector, vision, directory, ops, dtype, device)
        return VisionEncoder(vision, TowerWeights(found))
    entries = list_vision_tensors(directory)
    check_vision_tensors(directory, entries, vision.tensors)
    source = Checkpoint(directory, ops, dtype, device, entries=flatten_kernels(entries, vision))
    return VisionEncoder(vision, TowerWeights(source))


def flatten_kernels(entries: dict[str, TensorEntry], vision: VisionConfig) -> dict[str, TensorEntry]:
    """Return the tensors of the vision part in the shapes that `check_vision_tensors` compared, and numbers
    as vectors: a convolution whose stride is its size is a linear over patches.
    """
    found = {}
    for name, shape in vision.tensors.items():
        stored = replace(entries[name], shape=shape or (1,))
        found[name.replace("_projection_weight", "_projection.weight")] = stored
    return found
