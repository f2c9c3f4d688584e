"""Quantizer: quantizes and writes each weight as the model's layers request it, see `quantize.py`.

GPTQ (Frantar et al., 2022) quantizes columns in order and compensates each error in the columns not yet
quantized. Given the second moment E[x x^T] of a linear's inputs, the error of one input can in part be
predicted from the inputs after it, so their weights are adjusted before they are quantized in turn. Codes and
scales have the usual formats. Plain torch, float32: this runs once, when a checkpoint is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmbox.kernels.ops import PackedLinear
from llmbox.kernels.quant_formats import Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.weight_packing import (
    STEP_INPUTS,
    Packing,
    QuantizedWeight,
    best_int4_scale,
    int8_scale,
    round_to_grid,
    round_with_steps,
    step_and_zero,
)

from ..checkpoint.quantized_layout import SCALE, STEP, format_of
from ..checkpoint.tensor_io import ShardWriter
from ..distributed.communicator import SINGLE, TensorParallel
from ..weights.quantized import stored_codes
from ..weights.source import WeightRequest
from .calibration import Calibration
from .compressed_tensors import CompressedTarget

DAMPING = 0.01
"""Damping added to the diagonal, as a share of its mean: inputs of other texts differ."""


@dataclass(frozen=True, slots=True)
class GptqQuantizer:
    """Input statistics of one linear, prepared for quantizing its weights."""

    importance_I: Tensor
    """Mean square of each input."""
    later_II: Tensor
    """Upper triangular. Row i over its diagonal gives the compensation of an error in input i by the inputs
    after it.
    """

    @classmethod
    def of(cls, moment_II: Tensor) -> "GptqQuantizer":
        """Prepare from `moment_II`, the mean of x x^T, float32 and finite. Damping grows until the
        factorization succeeds.
        """
        diagonal_I = moment_II.diagonal()
        typical = float(diagonal_I.mean()) or 1.0
        damping = DAMPING
        while True:
            damped_II = moment_II + torch.eye(len(moment_II)) * (damping * typical)
            lower_II, failed = torch.linalg.cholesky_ex(damped_II)
            if not failed:
                later_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
            if not failed and bool(later_II.isfinite().all()):
                return cls(diagonal_I / typical + damping, later_II)
            damping *= 10

    def round(self, quant: Quant, weight_OI: Tensor) -> QuantizedWeight:
        weight_OI = weight_OI.float().clone()
        outputs, inputs = weight_OI.shape
        codes_OI = torch.empty(outputs, inputs, dtype=torch.int8)
        scales_OG = torch.empty(outputs, quant.groups(inputs), dtype=torch.float16)
        steps = []
        for g in range(quant.groups(inputs)):
            begin, end = g * quant.group, min((g + 1) * quant.group, inputs)
            group_Og = weight_OI[:, begin:end]
            grid = QuantGrid.of(group_Og, self.importance_I[begin:end], quant)
            later_gI = self.later_II[begin:end]
            errors_Og = round_group(group_Og, grid, later_gI[:, begin:end], codes_OI[:, begin:end])
            weight_OI[:, end:] -= errors_Og @ later_gI[:, end:]
            scales_OG[:, g] = grid.scale_O
            steps.append(grid.steps_OS)
        return QuantizedWeight(
            quant, codes_OI, scales_OG, steps_OS=torch.cat(steps, 1) if quant.step else None
        )


@dataclass(frozen=True, slots=True)
class QuantGrid:
    """Values that the weights of a group can have."""

    bits: int
    scale_O: Tensor
    """float16."""
    steps_OS: Tensor
    """Step bytes as in `QuantizedWeight`; without steps [O, 0]."""

    @classmethod
    def of(cls, group_Og: Tensor, importance_g: Tensor, quant: Quant) -> "QuantGrid":
        if not quant.step:
            none = torch.empty(len(group_Og), 0, dtype=torch.uint8)
            scale_O = int8_scale(group_Og) if quant.bits == 8 else best_int4_scale(group_Og, importance_g)
            return cls(quant.bits, scale_O.half(), none)
        fill = (0, quant.group - group_Og.shape[1])
        x_OGg, importance_Gg = pad(group_Og, fill).unsqueeze(1), pad(importance_g, fill).unsqueeze(0)
        _, scales_OG, steps_OGS = round_with_steps(x_OGg, quant, importance_Gg)
        return cls(quant.bits, scales_OG[:, 0], steps_OGS[:, 0])

    def nearest(self, x_O: Tensor, i: int) -> Tensor:
        """Round x, in units of the scale, to the nearest values of input i."""
        if not self.steps_OS.shape[1]:
            most = 1 << (self.bits - 1)
            return x_O.round().clamp_(-most, most - 1)
        step_O, zero_O = step_and_zero(self.steps_OS[:, i // STEP_INPUTS])
        return round_to_grid(x_O, step_O.float(), zero_O.float())


def round_group(group_Og: Tensor, grid: QuantGrid, later_gg: Tensor, codes_Og: Tensor) -> Tensor:
    """Quantize a group: fill `codes_Og`, adjust the weights in `group_Og`, return each error over its
    diagonal.
    """
    scale_O = grid.scale_O.float()
    inverse_O = torch.where(scale_O == 0, 0, 1 / scale_O)
    errors_gO = torch.empty(group_Og.shape[1], len(group_Og))
    for i, later_g in enumerate(later_gg):
        weight_O = group_Og[:, i]
        code_O = grid.nearest(weight_O * inverse_O, i)
        codes_Og[:, i] = code_O.to(torch.int8)
        errors_gO[i] = (weight_O - code_O * scale_O) / later_g[i]
        group_Og[:, i + 1 :] -= errors_gO[i].unsqueeze(1) * later_g[i + 1 :]
    return errors_gO.T


ROWS_AT_ONCE = 4096
"""Rows of a float32 weight whose error is measured at once: a whole output head would take gigabytes."""


@dataclass(frozen=True, slots=True)
class TensorError:
    """Quantization error of one tensor."""

    name: str
    format: str
    relative: float
    """Relative error |w - w'| / |w| in the Euclidean norm."""
    weighted: float
    """Relative error with the weights of the scale search (`importance`)."""


class Tensors(Protocol):
    """Source of whole tensors by name, each taken once: `Checkpoint` or `GgufTensors`."""

    dtype: torch.dtype
    """Dtype of unquantized tensors."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def split(self, name: str, parts: Mapping[str, int]) -> None: ...
    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None: ...
    def skip(self, name: str) -> None: ...
    def finish(self) -> None: ...


class Quantizer:
    """`WeightSource` that writes requested weights to a checkpoint, each in the format for its kind.

    Without `quant` and `packing` nothing is quantized. `target`: write what compressed-tensors reads, and
    unquantized tensors in `kept_dtype`.
    """

    def __init__(
        self,
        source: Tensors,
        quant: Quant | None,
        packing: Packing | None,
        out: ShardWriter,
        calibration: Calibration | None = None,
        target: CompressedTarget | None = None,
        kept_dtype: torch.dtype | None = None,
    ) -> None:
        self.ops = REFERENCE
        self.rank: TensorParallel = SINGLE
        self.dtype, self.device = source.dtype, torch.device("cpu")
        self.errors: list[TensorError] = []
        self.kept = 0
        self._squares = self._lost = 0.0
        self._source = source
        self._quant = quant
        self._packing = packing
        self._out = out
        self._calibration = calibration
        self._target = target
        self._kept_dtype = kept_dtype or source.dtype
        self._stacks: dict[str, tuple[str, int]] = {}
        """Name of the whole by that of a part, and the number of parts."""

    @property
    def relative(self) -> float:
        return (self._lost / self._squares) ** 0.5 if self._squares else 0.0

    def vector(self, name: str, size: int) -> Tensor:
        vector = self._source.take(name, (size,))
        self._keep(name, vector)
        return vector

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._source.floats(name, shape)
        self.kept += 1
        self._out.add({name: tensor})
        return tensor

    def packed(self, asked: WeightRequest) -> PackedLinear:
        quant = None if self._quant is None else format_of(self._quant, asked.kind)
        feedback = None
        if self._calibration is not None and asked.kind == "linear":
            feedback = GptqQuantizer.of(self._calibration.moment(asked.name))
        weights = {
            name: self._source.take(f"{name}.weight", (rows.total, asked.inputs.total))
            for name, rows in asked.outputs.items()
        }
        biases = {
            name: self._source.take(f"{name}.bias", (rows.total,))
            for name, rows in asked.outputs.items()
            if asked.bias
        }
        for name, weight_OI in self._stacked(weights).items():
            if quant is None:
                self._keep(f"{name}.weight", weight_OI)
            elif self._target is not None:
                self._store(self._target, name, weight_OI, feedback)
            else:
                self._round(f"{name}.weight", weight_OI, quant, feedback)
        for name, bias_O in self._stacked(biases).items():
            self._keep(f"{name}.bias", bias_O)
        return None

    def _stacked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stack the parts of a linear that the model's own files have as one, for other tools. Parts that are
        requested one by one stay apart.
        """
        stack, parts = self._stacks.get(next(iter(tensors), ""), ("", 0))
        if not stack or len(tensors) != parts or (self._target is None and self._quant is not None):
            return tensors
        return {stack: torch.cat(list(tensors.values()))}

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        self._stacks |= dict.fromkeys(parts, (name, len(parts)))
        self._source.split(name, parts)

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        self._source.split_experts(name, parts, transposed=transposed)

    def skip(self, name: str) -> None:
        self._source.skip(name)

    def skip_experts(self, *_: object) -> None:
        """Do nothing: one process has all experts."""

    def finish(self) -> None:
        self._source.finish()

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.kept += 1
        self._out.add({name: tensor.to(self._kept_dtype)})

    def _store(
        self, target: CompressedTarget, name: str, weight_OI: Tensor, feedback: GptqQuantizer | None
    ) -> None:
        assert self._packing is not None
        nearest = self._packing.round if feedback is None else feedback.round
        tensors, rounded = target.store(
            name, weight_OI, self._kept_dtype, nearest, exact=feedback is not None
        )
        self._out.add(tensors)
        self._measure(f"{name}.weight", weight_OI, rounded, target.quant.group)

    def _round(self, name: str, weight_OI: Tensor, quant: Quant, feedback: GptqQuantizer | None) -> None:
        assert self._packing is not None
        nearest = self._packing.round if feedback is None else feedback.round
        rounded = nearest(quant, weight_OI)
        self._out.add({name: stored_codes(rounded), name + SCALE: rounded.scales_OG})
        if rounded.steps_OS is not None:
            self._out.add({name + STEP: rounded.steps_OS})
        self._measure(name, weight_OI, rounded, quant.step or quant.group)

    def _measure(self, name: str, weight_OI: Tensor, rounded: QuantizedWeight, group: int) -> None:
        """Add the error of rounded weights to the report."""
        quant = rounded.quant
        squares = lost = weighted = weights = 0.0
        for start in range(0, len(weight_OI), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            w = weight_OI[rows].float()
            part = QuantizedWeight(
                quant, rounded.codes_OI[rows], rounded.scales_OG[rows]
            )  # steps are in the codes
            error = (w - part.floats()).square()
            square = w.square()
            squares += float(square.sum(dtype=torch.float64))
            lost += float(error.sum(dtype=torch.float64))
            counts = importance(w, group)
            weighted += float((counts * error).sum(dtype=torch.float64))
            weights += float((counts * square).sum(dtype=torch.float64))
        self._squares, self._lost = self._squares + squares, self._lost + lost
        self.errors.append(
            TensorError(
                name,
                quant.name,
                (lost / squares) ** 0.5 if squares else 0.0,
                (weighted / weights) ** 0.5 if weights else 0.0,
            )
        )


def importance(weight_OI: Tensor, group: int) -> Tensor:
    """Return the weights of squared errors in the scale search: |w| + RMS of its group or sub-block."""
    outputs, inputs = weight_OI.shape
    groups = torch.nn.functional.pad(weight_OI, (0, -inputs % group)).view(outputs, -1, group)
    typical = groups.square().mean(-1, keepdim=True).sqrt()
    return (groups.abs() + typical).flatten(1)[:, :inputs]
