"""Decoders of published weight formats (`checkpoint/formats`): stored tensors to numbers with scales.

A decoder gets the whole tensors of one linear and returns a `DecodedLinear`; ranks take their part of it. The
numbers are exact: what a kernel multiplies, or `floats` returns, are the weights that the format's own
library computes. O outputs, I inputs, G groups of inputs that share a scale.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from llmbox.kernels.weight_packing import E2M1_DOUBLED

from ..checkpoint.formats.floats import (
    FP8_BLOCK,
    MX_GROUP,
    NV_GROUP,
    Bnb4Format,
    Bnb8Format,
    Float8Format,
    MxFp4Format,
    NvFp4Format,
)
from ..checkpoint.formats.integers import (
    BITNET_PACKED,
    HQQ_PACKED,
    AwqFormat,
    BitNetFormat,
    CompressedBytes,
    CompressedWords,
    EetqFormat,
    GptqFormat,
    HqqFormat,
    Integers,
)
from ..checkpoint.formats.torchao import (
    QDATA,
    SCALE,
    SCALE_AND_ZERO,
    ZERO,
    TorchAoBytes,
    TorchAoInt4,
    TorchAoTiles,
)
from ..checkpoint.formats.weight_format import WeightFormat

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of AWQ for each of eight outputs."""

_EETQ_ORDER: Final = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Input of each of 16 bytes of EETQ."""

Tensors = Mapping[str, Tensor]
"""Tensors of one linear by the end of their names, whole, as they are stored."""


class BadTensor(ValueError):  # noqa: N818 - named for what it says
    """Content of a tensor that its format does not allow: the end of its name, and the reason."""

    def __init__(self, suffix: str, reason: str) -> None:
        super().__init__(reason)
        self.suffix = suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedLinear:
    """Weights of a linear: numbers [O, I] times the scale of their output and group."""

    numbers_OI: Tensor
    """Integers (int8 or int16), or float32 weights where there are no scales."""
    scales_OG: Tensor | None = None
    """Float32. One column: all inputs of an output share a scale."""
    group: int = 0
    """Inputs that share a scale; 0: all of them."""
    zeros_OG: Tensor | None = None
    """Zero points that the numbers are differences from, uint8, where a kernel stores them."""
    groups_I: Tensor | None = None
    """Group of each input, where groups are not inputs next to each other (act-order)."""

    def floats(self) -> Tensor:
        """Return the weights [O, I] in float32."""
        if self.scales_OG is None:
            return self.numbers_OI.float()
        inputs = self.numbers_OI.shape[1]
        if self.groups_I is not None:
            return self.numbers_OI.float() * self.scales_OG[:, self.groups_I]
        if not self.group:
            return self.numbers_OI.float() * self.scales_OG
        return self.numbers_OI.float() * self.scales_OG.repeat_interleave(self.group, 1)[:, :inputs]


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the last dimension, a stream of numbers of `bits` bits, lowest bits first, to `count` int32."""
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream[..., :count].int()
    if bits == 4:
        return torch.stack((stream & 15, stream >> 4), -1).flatten(-2)[..., :count].int()
    # Eight numbers take `bits` bytes.
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % bits)).long()
    joined = (stream.view(*stream.shape[:-1], -1, bits) << (8 * torch.arange(bits))).sum(-1, keepdim=True)
    numbers = (joined >> (bits * torch.arange(8))) & ((1 << bits) - 1)
    return numbers.flatten(-2)[..., :count].int()


def decode_awq(form: AwqFormat, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    def unpack(words: Tensor) -> Tensor:
        return unpack_bits(words, 4, outputs).view(len(words), -1, 8)[..., list(_AWQ_ORDER)].flatten(1)

    q_IO, zeros_GO = unpack(stored[".qweight"]), unpack(stored[".qzeros"])
    return _grouped(form, q_IO.T, zeros_GO.T, stored[".scales"].T, inputs)


def decode_gptq(form: GptqFormat, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    q_OI = unpack_bits(stored[".qweight"].T, form.bits, inputs)
    zeros_GO = unpack_bits(stored[".qzeros"], form.bits, outputs)
    middle = 1 << (form.bits - 1)
    offset = form.zero_offset
    if offset is None:
        offset = 0 if bool((zeros_GO == middle).all()) else 1
    zeros_GO = (zeros_GO + offset) & ((1 << form.bits) - 1)  # a zero of 0 is stored as -1 in version 1
    if form.is_symmetric and form.bits in (4, 8) and not bool((zeros_GO == middle).all()):
        raise BadTensor(".qzeros", f"has other zeros than {middle}, but config.json says `sym`: true")
    return _grouped(form, q_OI, zeros_GO.T, stored[".scales"].T, inputs, stored.get(".g_idx"), ".g_idx")


def decode_compressed_words(
    form: CompressedWords, stored: Tensors, outputs: int, inputs: int
) -> DecodedLinear:
    shape = stored.get(".weight_shape")
    if shape is not None and shape.tolist() != [outputs, inputs]:
        raise BadTensor(".weight_shape", f"holds {shape.tolist()}, config.json asks for {[outputs, inputs]}")
    q_OI = unpack_bits(stored[".weight_packed"], form.bits, inputs)
    middle = 1 << (form.bits - 1)
    if form.is_symmetric:
        zeros_OG = torch.full((outputs, form.groups(inputs)), middle, dtype=torch.int32)
    else:
        zeros_OG = unpack_bits(stored[".weight_zero_point"].T, form.bits, outputs).T
    g_idx = stored.get(".weight_g_idx")
    return _grouped(form, q_OI, zeros_OG, stored[".weight_scale"], inputs, g_idx, ".weight_g_idx")


def decode_compressed_bytes(
    form: CompressedBytes, stored: Tensors, outputs: int, inputs: int
) -> DecodedLinear:
    groups = form.groups(inputs)
    scales_OG = stored[".weight_scale"].reshape(-1, groups).float().expand(outputs, groups)
    zeros = None if form.is_symmetric else stored.get(".weight_zero_point")
    q_OI = stored[".weight"]
    if zeros is not None:
        zeros_OG = zeros.reshape(-1, groups).short().expand(outputs, groups)
        q_OI = q_OI.short() - _spread(zeros_OG, form.group, inputs)
    return DecodedLinear(numbers_OI=q_OI, scales_OG=scales_OG, group=form.group)


def decode_eetq(_form: EetqFormat, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    """Put the numbers in the order of inputs. EETQ orders 16 inputs as `_EETQ_ORDER`, interleaves two outputs
    by 64 inputs, adds 128, and swaps the middle two of four bytes: for Turing, Ampere and Ada.
    """
    if inputs % 64 or outputs % 64:
        raise BadTensor(".weight", f"has {inputs} inputs and {outputs} outputs, not multiples of 64")
    bytes_OI = stored[".weight"].reshape(-1, 4)[:, [0, 2, 1, 3]].view(torch.uint8) ^ 0x80
    bytes_OI = bytes_OI.reshape(outputs // 2, inputs // 64, 2, 64).transpose(1, 2).reshape(outputs, -1, 16)
    numbers_OI = torch.empty_like(bytes_OI)
    numbers_OI[..., list(_EETQ_ORDER)] = bytes_OI
    scales_OG = stored[".weight_scales"].reshape(-1, 1).float()
    return DecodedLinear(numbers_OI=numbers_OI.reshape(outputs, inputs).view(torch.int8), scales_OG=scales_OG)


def decode_bitnet(form: BitNetFormat, stored: Tensors, outputs: int, _inputs: int) -> DecodedLinear:
    packed = stored[".weight"]
    q_OI = torch.cat([(packed >> 2 * place) & 3 for place in range(BITNET_PACKED)])[:outputs]
    if bool((q_OI == 3).any()):
        raise BadTensor(".weight", "holds 3, which stands for no weight")
    scale = stored[".weight_scale"].float().reshape(1, 1)
    if not bool((scale > 0).all() and scale.isfinite().all()):
        raise BadTensor(".weight_scale", f"is {scale.item()}, no scale")
    scales_OG = (1 / scale if form.divides else scale).expand(outputs, 1)
    return DecodedLinear(numbers_OI=q_OI.to(torch.int8) - 1, scales_OG=scales_OG)


def decode_torchao_bytes(form: TorchAoBytes, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    def spread(values: Tensor) -> Tensor:
        return values.reshape(-1, form.groups(inputs)).expand(outputs, -1)

    scales_OG, zeros = spread(stored[SCALE]), stored.get(ZERO)
    if zeros is None or form.is_symmetric:
        if zeros is not None and bool(zeros.any()):
            raise BadTensor(ZERO, "has other zeros than 0, but config.json says that weights are symmetric")
        return DecodedLinear(numbers_OI=stored[QDATA], scales_OG=scales_OG.float(), group=form.group)
    middle = 1 << (form.bits - 1)
    return _grouped(form, stored[QDATA].short() + middle, spread(zeros).short() + middle, scales_OG, inputs)


def decode_torchao_int4(form: TorchAoInt4, stored: Tensors, _outputs: int, inputs: int) -> DecodedLinear:
    n_OI = unpack_bits(stored[QDATA], 4, inputs)
    return _shifted(form, (n_OI ^ 8) - 8, stored[SCALE].T, stored[ZERO].T, inputs)


def decode_torchao_tiles(form: TorchAoTiles, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    """Decode words of eight inputs: tiles of 8 outputs by 128 inputs, 32 lanes of four words each. A lane
    holds two neighbors of inputs four times, 8 inputs apart, the first of each in the low half of a word.
    """
    rows, columns = form.padded(outputs, inputs)
    n = unpack_bits(stored[QDATA].reshape(-1, 1), 4, 8)
    n = n.view(rows // 8, columns // 128, 8, 4, 4, 2, 2, 2)  # tile, tile, output, lane, word, odd, 16s, 8s
    n_OI = n.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(rows, columns)[:outputs, :inputs]
    scale, zero = stored[SCALE_AND_ZERO][:, :outputs].permute(2, 1, 0)
    return _shifted(form, n_OI - 8, scale, zero, inputs)


def _shifted(form: Integers, n_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, inputs: int) -> DecodedLinear:
    """Return n * scale + zero in float32, of zeros that are floats."""
    scales, zeros = (_spread(each.float(), form.group, inputs) for each in (scale_OG, zero_OG))
    return DecodedLinear(numbers_OI=n_OI.float() * scales + zeros)


def decode_hqq(form: HqqFormat, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    """Decode in the dtype of scales and zeros, as HQQ does: zeros are not integers."""
    shape = stored.get(".shape")
    if shape is not None and shape.tolist() != [outputs, inputs]:
        raise BadTensor(".shape", f"holds {shape.tolist()}, config.json asks for {[outputs, inputs]}")
    words, bits, count = stored[".W_q"].int(), form.bits, HQQ_PACKED[form.bits]
    parts = [(words >> (bits * (count - 1 - place))) & ((1 << bits) - 1) for place in range(count)]
    numbers = torch.cat(parts)[: form.rows(outputs, inputs)[0]]
    scale, zero = stored[".scale"], stored[".zero"]
    return DecodedLinear(
        numbers_OI=((numbers.to(scale.dtype) - zero) * scale).reshape(outputs, inputs).float()
    )


def _grouped(
    form: Integers,
    q_OI: Tensor,
    zeros_OG: Tensor,
    scales_OG: Tensor,
    inputs: int,
    g_idx: Tensor | None = None,
    suffix: str = "",
) -> DecodedLinear:
    """Subtract the zeros of each group. `g_idx` is the group of each input."""
    groups_I = None
    if g_idx is not None and form.group:
        if not bool(((g_idx >= 0) & (g_idx < scales_OG.shape[1])).all()):
            raise BadTensor(suffix, f"names groups outside 0 to {scales_OG.shape[1] - 1}")
        if not torch.equal(g_idx, torch.arange(inputs, dtype=g_idx.dtype) // form.group):
            groups_I = g_idx.long()
    zeros_OI = zeros_OG[:, groups_I] if groups_I is not None else _spread(zeros_OG, form.group, inputs)
    numbers_OI = q_OI.short() - zeros_OI.short()
    if form.quant is not None:
        numbers_OI = numbers_OI.to(torch.int8)
    return DecodedLinear(
        numbers_OI=numbers_OI,
        scales_OG=scales_OG.float(),
        group=form.group,
        zeros_OG=zeros_OG.to(torch.uint8),
        groups_I=groups_I,
    )


def _spread(values_OG: Tensor, group: int, inputs: int) -> Tensor:
    return values_OG.repeat_interleave(group, 1)[:, :inputs] if group else values_OG


def unpack_e2m1(stored: Tensor) -> Tensor:
    """Unpack pairs of E2M1 numbers, low half first, to their values times two: int8 [..., 2 x bytes]."""
    table = torch.tensor(E2M1_DOUBLED, dtype=torch.int8)
    halves = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    return table[halves.long()]


def decode_mxfp4(form: MxFp4Format, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    """Decode E2M1 with E8M0 scales: the numbers are doubled, and the scales halved."""
    numbers_OI = unpack_e2m1(stored[form.main_suffix].reshape(outputs, -1))[:, :inputs]
    exponents_OG = stored[form.scale_suffix].reshape(outputs, -1)
    if bool((exponents_OG == 255).any()):
        raise BadTensor(form.scale_suffix, "holds 255, which is not a power of two")
    scales_OG = torch.ldexp(torch.full(exponents_OG.shape, 0.5), exponents_OG.int() - 127)
    return DecodedLinear(numbers_OI=numbers_OI, scales_OG=scales_OG, group=MX_GROUP)


def decode_nvfp4(
    form: NvFp4Format,
    stored: Tensors,
    outputs: int,  # noqa: ARG001
    inputs: int,
) -> DecodedLinear:
    whole = stored[form.global_suffix].reshape(1, 1)
    if not bool((whole > 0).all() and whole.isfinite().all()):
        raise BadTensor(form.global_suffix, f"is {whole.item()}, which is not a valid scale")
    scales_OG = stored[".weight_scale"].float()
    scales_OG = scales_OG / whole if form.divides else scales_OG * whole
    values_OI = unpack_e2m1(stored[form.main_suffix])[:, :inputs].float() / 2
    return DecodedLinear(numbers_OI=values_OI * _spread(scales_OG, NV_GROUP, inputs))


def decode_float8(form: Float8Format, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:  # noqa: ARG001
    scales = stored[".weight_scale"].float()
    if scales.ndim == 2 and scales.shape[1] > 1:
        scales = scales.repeat_interleave(FP8_BLOCK, 0)[:outputs].repeat_interleave(FP8_BLOCK, 1)[:, :inputs]
    else:
        scales = scales.reshape(-1, 1)
    return DecodedLinear(numbers_OI=stored[".weight"].float() * scales)


def decode_bnb4(form: Bnb4Format, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    """Decode NF4 or FP4: places in a table of 16 times the largest weight of a block of inputs."""
    state_suffix = f".weight.quant_state.bitsandbytes__{form.kind}"
    state = _bnb_state(stored[state_suffix], state_suffix)
    if list(state.get("shape", ())) != [outputs, inputs]:
        raise BadTensor(state_suffix, f"names a shape of {state.get('shape')}, not {[outputs, inputs]}")
    block = state.get("blocksize")
    if type(block) is not int or block <= 0:
        raise BadTensor(state_suffix, f"names blocks of {block!r}")
    packed, table = stored[".weight"].flatten(), stored[".weight.quant_map"].flatten()
    count = outputs * inputs
    absmax = stored[".weight.absmax"].flatten()
    if len(packed) != -(-count // 2) or absmax.numel() != -(-count // block) or table.numel() != 16:
        raise BadTensor(".weight.absmax", f"has {absmax.numel()} scales, not one for each {block} weights")
    if absmax.dtype == torch.uint8:
        absmax = _nested_absmax(stored, state, state_suffix)
    places = torch.stack((packed >> 4, packed & 15), -1).flatten()[:count].long()
    weights = table[places] * absmax.float().repeat_interleave(block)[:count]
    return DecodedLinear(numbers_OI=weights.view(outputs, inputs))


def _bnb_state(stored: Tensor, suffix: str) -> dict[str, Any]:
    try:
        state = json.loads(bytes(stored.flatten().tolist()))
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise BadTensor(suffix, "is not valid JSON")
    return state


def _nested_absmax(stored: Tensors, state: Mapping[str, Any], suffix: str) -> Tensor:
    places, offset = stored[".weight.absmax"].flatten().long(), state.get("nested_offset")
    scales, table = stored.get(".weight.nested_absmax"), stored.get(".weight.nested_quant_map")
    block = state.get("nested_blocksize", 256)
    if scales is None or table is None or table.numel() != 256 or type(block) is not int or block <= 0:
        raise BadTensor(".weight.absmax", "has 8 bits, but there are no nested_absmax and nested_quant_map")
    if not isinstance(offset, int | float) or scales.numel() != -(-places.numel() // block):
        raise BadTensor(suffix, "does not fit nested_absmax")
    return table.flatten()[places] * scales.flatten().repeat_interleave(block)[: places.numel()] + offset


def decode_bnb8(form: Bnb8Format, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:  # noqa: ARG001
    if ".weight_format" in stored and bool(stored[".weight_format"].any()):
        raise BadTensor(
            ".weight_format", "names an order of weights other than by row, which is not supported"
        )
    return DecodedLinear(numbers_OI=stored[".weight"], scales_OG=(stored[".SCB"] / 127).view(-1, 1))


DECODERS: Final[Mapping[type, Callable[[Any, Tensors, int, int], DecodedLinear]]] = {
    AwqFormat: decode_awq,
    GptqFormat: decode_gptq,
    CompressedWords: decode_compressed_words,
    CompressedBytes: decode_compressed_bytes,
    EetqFormat: decode_eetq,
    BitNetFormat: decode_bitnet,
    TorchAoBytes: decode_torchao_bytes,
    TorchAoInt4: decode_torchao_int4,
    TorchAoTiles: decode_torchao_tiles,
    HqqFormat: decode_hqq,
    MxFp4Format: decode_mxfp4,
    NvFp4Format: decode_nvfp4,
    Float8Format: decode_float8,
    Bnb4Format: decode_bnb4,
    Bnb8Format: decode_bnb8,
}


def decode(form: WeightFormat, stored: Tensors, outputs: int, inputs: int) -> DecodedLinear:
    """Decode the tensors of one linear, which `check_tensor` has seen. Raises BadTensor."""
    return DECODERS[type(form)](form, stored, outputs, inputs)
