"""Rotary position embedding (RoPE): frequencies of every variant, and the cos and sin rows of one step. Also
biases of attention scores by distance, which some encoders have instead.

A token's rotation is a function of its position alone, so caching, chunking and resuming never change it. Two
variants derive frequencies from the length of the sequence:

    dynamic     fixed at load to the served context; equal to transformers at that length
    longrope    two sets of factors. A sequence has the short ones up to the original context; one that grows
                beyond it is computed again from its first token with the long ones (`Request.is_long`)

A RoPE tables, T rows of the step, D head dim, D2 half of it, H heads, L rows of one text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from llmbox.kernels.op_types import CosSin, cos_sin

from ..model_config.config import ModelConfig
from ..model_config.rope import RopeConfig
from ..model_config.vision.config import VisionConfig
from ..weights.source import Weights

KNOWN: Final = 16384
"""Positions whose rows are kept once computed: 1 KB each for heads of 128."""
KNOWN_AT_ONCE: Final = 64


class Rotary:
    """RoPE tables of a model, one for each of `config.ropes`."""

    def __init__(
        self,
        config: ModelConfig,
        context: int,
        device: torch.device,
        turn: CosSin = cos_sin,
        *,
        is_fixed: bool = False,
    ) -> None:
        """`context`: the longest sequence served. `turn`: `Ops.cos_sin`. `is_fixed`: LongRoPE has the factors
        of `context` for sequences of all lengths.
        """
        self._turn = turn
        self._known_length = min(context, KNOWN) if device.type == "cpu" else 0
        self._known: dict[bool, tuple[Tensor, set[int]]] = {}
        """By `is_long`: results of `rows` at the first positions, and which parts of them were computed."""
        self.short_context = 0 if is_fixed else config.short_context
        """Longest sequence with the short factors of LongRoPE; 0: there is one set."""
        self._tables = [
            self._frequencies(config, context, device, is_long=is_long)
            for is_long in ((False, True) if self.short_context else (None,))
        ]
        """Inverse frequencies and scales, [A, 1, D2] each: those of short sequences, then of long ones."""
        half = config.rope_width // 2
        self._growths = [(a, rope) for a, rope in enumerate(config.ropes) if rope.of_queries]
        narrow = config.sliding_heads
        sliding = {
            config.layer_ropes[layer] for layer, window in enumerate(config.windows) if window is not None
        }
        self._narrow = [(a, narrow[1] // 2) for a in sliding] if narrow else []
        """Tables of narrower heads, in the first columns of wider ones, and half their widths."""
        vision = config.vision
        self._axis_D2 = None
        if vision is not None and vision.mrope_section:
            self._axis_D2 = frequency_axes(vision, half).to(device)

    @staticmethod
    def _frequencies(
        config: ModelConfig, context: int, device: torch.device, *, is_long: bool | None
    ) -> tuple[Tensor, Tensor]:
        """Return the inverse frequencies of long or of short sequences, and the factors of cos and sin. None:
        of sequences of all lengths.
        """
        half = config.rope_width // 2
        inverse_A1D2, scale_A1D2 = (torch.zeros(len(config.ropes), 1, half) for _ in range(2))
        for a, rope in enumerate(config.ropes):
            turned = rope.rotary_dim // 2  # the other dims of each half have angle 0: they are not rotated
            length = context
            if is_long is not None and rope.short_context:
                length = rope.short_context + is_long
            inverse_A1D2[a, 0, :turned] = inverse_frequencies(config, rope, length)
            scale_A1D2[a, 0] = 1.0
            scale_A1D2[a, 0, :turned] = attention_scale(rope, length)
        return inverse_A1D2.to(device), scale_A1D2.to(device)

    def rows(self, positions_T: Tensor, is_long: Tensor | bool = False) -> tuple[Tensor, Tensor]:
        """Return cos_ATD = (cos, cos) and sin_ATD = (-sin, sin), float32. Positions [3, T] are those by time,
        height and width (M-RoPE): each frequency has one of them.

        `is_long`: whether the sequences of all rows, or of each [T], are longer than `short_context`.
        """
        inverse_ATD2, scale_ATD2 = self._choose(is_long)
        if positions_T.dim() == 1:
            angle = positions_T.float().unsqueeze(1) * inverse_ATD2
        else:
            assert self._axis_D2 is not None
            angle = positions_T.float()[self._axis_D2].T * inverse_ATD2
            positions_T = positions_T[0]
        cos, sin = (each * scale_ATD2 for each in self._turn(angle))
        for a, rope in self._growths:
            steps_T = (positions_T + rope.growth_start) // rope.original_context
            growth_T1 = (1 + steps_T.double()).log_().float().unsqueeze(1)
            growth_T1 = growth_T1.mul_(rope.query_growth).add_(1)
            cos[a] *= growth_T1
            sin[a] *= growth_T1
        cos, sin = torch.cat((cos, cos), 2), torch.cat((-sin, sin), 2)
        for a, half in self._narrow:
            cos[a, :, half : 2 * half], sin[a, :, half : 2 * half] = cos[a, :, :half], -sin[a, :, :half]
        return cos, sin

    def decoding_rows(
        self, positions_T: Tensor, positions: Sequence[int], *, is_long: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what `rows` does, on a CPU from a table that grows: to make ten tensors takes longer than
        their few numbers. `positions`: the same as `positions_T`.
        """
        if max(positions) >= self._known_length:
            return self.rows(positions_T, is_long)
        if is_long not in self._known:
            tables, _, half = self._tables[0][0].shape
            self._known[is_long] = torch.empty(2, tables, self._known_length, 2 * half), set()
        known, parts = self._known[is_long]
        for part in {position // KNOWN_AT_ONCE for position in positions} - parts:
            begin = part * KNOWN_AT_ONCE
            end = min(begin + KNOWN_AT_ONCE, self._known_length)
            at_P = torch.arange(begin, end, dtype=torch.int32)
            known[0, :, begin:end], known[1, :, begin:end] = self.rows(at_P, is_long)
            parts.add(part)
        cos_ATD, sin_ATD = known.index_select(2, positions_T).unbind()
        return cos_ATD, sin_ATD

    def _choose(self, is_long: Tensor | bool) -> tuple[Tensor, Tensor]:
        """Return the inverse frequencies and scales of rows, [A, T, D2], or [A, 1, D2] for all of them."""
        if isinstance(is_long, bool):
            return self._tables[is_long]
        short, long = self._tables
        is_long_T1 = is_long.unsqueeze(1)
        return torch.where(is_long_T1, long[0], short[0]), torch.where(is_long_T1, long[1], short[1])


def frequency_axes(vision: VisionConfig, half: int) -> Tensor:
    """Return the axis of each of the first `half` frequencies: 0 for time, 1 for height, 2 for width."""
    axis_D2 = torch.zeros(half, dtype=torch.long)
    begin = vision.mrope_section[0]
    for axis, count in enumerate(vision.mrope_section[1:], 1):
        if vision.mrope_interleaved:
            axis_D2[axis : 3 * count : 3] = axis
        else:
            axis_D2[begin : begin + count] = axis
            begin += count
    return axis_D2


def inverse_frequencies(config: ModelConfig, rope: RopeConfig, context: int) -> Tensor:
    """Return the inverse frequencies [rotary_dim / 2] of the rotated dims."""
    dim, max_positions = rope.rotary_dim, config.max_position_embeddings
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    theta = rope.theta
    if rope.rope_type == "dynamic" and context > max_positions:
        stretch = rope.factor * context / max_positions - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    # Powers in float64: those of float32 differ in their last bit between instruction sets.
    powers = (theta ** exponents.double()).float()
    inverse = 1.0 / powers
    match rope.rope_type:
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return llama3(rope, inverse)
        case "proportional":
            inverse[rope.turned // 2 :] = 0
            return inverse / rope.factor
        case "yarn":
            return yarn(rope, inverse, dim)
        case "longrope":
            factors = rope.long_factor if context > rope.original_context else rope.short_factor
            return 1.0 / (torch.tensor(factors) * powers)
    return inverse


def llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Scale frequencies as Llama 3.1: long wavelengths are stretched, short ones kept, a ramp between."""
    wavelength = 2 * math.pi / inverse
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inverse / rope.factor + smooth * inverse
    stretched = torch.where(wavelength > low, inverse / rope.factor, between)
    return torch.where(wavelength < high, inverse, stretched)


def yarn(rope: RopeConfig, inverse: Tensor, dim: int) -> Tensor:
    """Scale frequencies as YaRN (Peng et al., 2023): fast dims are kept, slow ones interpolated."""

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    interpolated = ramp.clamp(0, 1)
    return inverse / rope.factor * interpolated + inverse * (1 - interpolated)


def attention_scale(rope: RopeConfig, context: int = 0) -> float:
    """Return the factor of cos and sin that scales attention logits (YaRN, LongRoPE)."""
    if rope.rope_type not in {"yarn", "longrope"}:
        return 1.0
    if rope.mscales is not None:
        return rope.mscales[context > rope.original_context]
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        if rope.factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    return yarn_scale(rope.factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


_REMEMBERED: Final = 512
"""Longest text whose biases are kept for the next layer."""
_FARTHEST: Final = 128
"""Distance from which all share the last bucket of a learned bias (MPNet)."""

ScoreBias = Callable[[int, int, int], Tensor]
"""(rows L of a text, first query, one after the last) -> [H, queries, L], added to scores of attention."""


class DistanceBias:
    """Learned bias of attention scores by the distance of two tokens, in buckets (MPNet)."""

    def __init__(self, weights: Weights, config: ModelConfig, buckets: int) -> None:
        table = weights.floats("model.relative_bias.weight", buckets, config.num_heads)
        limit = config.max_position_embeddings
        distances = torch.arange(1 - limit, limit)
        self._zero = limit - 1
        places_P = _bucket(distances, buckets).to(table.device)
        self._values_HP = table[places_P].T.to(weights.dtype).contiguous()

    def __call__(self, length: int, first: int, last: int) -> Tensor:
        distances = _distances(length, first, last, self._values_HP.device)
        return self._values_HP[:, distances + self._zero]


class AlibiBias:
    """Bias of attention scores by minus the distance of two tokens, times a number of each head (ALiBi)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._slopes_H11 = torch.tensor(alibi_slopes(config.num_heads), device=device).view(-1, 1, 1)
        self._dtype = dtype

    def __call__(self, length: int, first: int, last: int) -> Tensor:
        distances = _distances(length, first, last, self._slopes_H11.device)
        return (-self._slopes_H11 * distances.abs()).to(self._dtype)


def alibi_slopes(heads: int) -> list[float]:
    """Return powers of one number for heads that are a power of 2; for others those of the next lower power,
    and between them every other one of the next higher.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * power, 2)][: heads - power]


def _distances(length: int, first: int, last: int, device: torch.device) -> Tensor:
    """Return the distance of each key of a text from each query of `first` to `last` - 1."""
    return torch.arange(length, device=device) - torch.arange(first, last, device=device).unsqueeze(1)


def _bucket(distances: Tensor, buckets: int) -> Tensor:
    """Return the bucket of each distance, key minus query: half of them for each direction, in it the first
    half for single distances, the others for ranges that grow by a factor.
    """
    half = buckets // 2
    near, far = half // 2, distances.abs().clamp(min=1).float()
    ratio = torch.log(far / near) / torch.log(torch.tensor(_FARTHEST / near)) * (half - near)
    ranges = (near + ratio.long()).clamp(max=half - 1)
    return torch.where(distances.abs() < near, distances.abs(), ranges) + half * (distances > 0)


def remembered(make: ScoreBias) -> ScoreBias:
    """Return `make` with the results of one step kept for short texts: all layers have the same biases."""
    known: dict[tuple[int, int, int], Tensor] = {}

    def find(length: int, first: int, last: int) -> Tensor:
        if length > _REMEMBERED:
            return make(length, first, last)
        if (key := (length, first, last)) not in known:
            known[key] = make(*key)
        return known[key]

    return find
