"""Tiny checkpoints in the formats that other tools publish, and the weights that they stand for.

Written from the published definitions, with the formats' own libraries where these run on a CPU
(compressed-tensors, bitsandbytes), and not with the code that reads them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.kernels.quant_formats import Quant
from llmbox.kernels.weight_packing import E2M1_DOUBLED, QuantizedWeight, scale_dtype

Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors of a linear by the end of their names, and its dequantized weight, float32."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Rows as streams of bits, lowest first, in int32 words."""
    rows = numbers.numpy().astype(np.uint64)
    spread = (rows[:, :, None] >> np.arange(bits, dtype=np.uint64)) & 1
    stream = spread.reshape(len(rows), -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def round_groups(
    weight_OI: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Round to nearest: numbers [O, I] from 0 on, zeros [O, G] and scales [O, G]."""
    outputs, inputs = weight_OI.shape
    size = group or inputs
    x = weight_OI.float().view(outputs, -1, size)
    most = (1 << bits) - 1
    if symmetric:
        scales = (2 * x.abs().amax(-1) / most).to(dtype)
        zeros = torch.full_like(scales, (most + 1) // 2, dtype=torch.int32)
    else:
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most).int()
    numbers = (x / scales.float()[..., None]).round() + zeros[..., None]
    return numbers.clamp(0, most).int().view(outputs, inputs), zeros, scales


def widen(numbers: Tensor, zeros: Tensor, scales: Tensor, groups_I: Tensor) -> Tensor:
    return (numbers - zeros[:, groups_I]).float() * scales.float()[:, groups_I]


def awq(weight: Tensor, group: int = 128) -> Stored:
    numbers, zeros, scales = round_groups(weight, 4, group, symmetric=False)

    def pack(rows: Tensor) -> Tensor:
        eight = rows.view(len(rows), -1, 8)[..., list(AWQ_ORDER)]
        return pack_words(eight.flatten(1), 4)

    groups = torch.arange(weight.shape[1]) // (group or weight.shape[1])
    stored = {
        ".qweight": pack(numbers.T.contiguous()),
        ".qzeros": pack(zeros.T.contiguous()),
        ".scales": scales.T.contiguous(),
    }
    return stored, widen(numbers, zeros, scales, groups)


def gptq(
    weight: Tensor,
    bits: int = 4,
    group: int = 128,
    *,
    symmetric: bool = True,
    version: int = 1,
    order: bool = False,
) -> Stored:
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // (group or inputs)
    shuffled = weight
    if order:  # the same for linears that read the same inputs
        places = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        shuffled, g_idx = weight[:, places], torch.empty_like(groups)
        g_idx[places] = groups
        groups = g_idx
    numbers, zeros, scales = round_groups(shuffled, bits, group, symmetric=symmetric)
    if order:
        numbers = torch.empty_like(numbers).index_copy_(1, places, numbers)
    kept = (zeros.T - int(version == 1)) & ((1 << bits) - 1)
    stored = {
        ".qweight": pack_words(numbers.contiguous(), bits).T.contiguous(),
        ".qzeros": pack_words(kept.contiguous(), bits),
        ".scales": scales.T.contiguous(),
        ".g_idx": groups.int(),
        ".bias": torch.zeros(len(weight), dtype=torch.float16),
    }
    return stored, widen(numbers, zeros, scales, groups)


def compressed(weight: Tensor, scheme: Mapping[str, Any], form: str) -> Stored:
    """By the compressors of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    known = QuantizationScheme(targets=["Linear"], **scheme)
    weight = weight.float()  # the library multiplies in the dtype of the scales
    state, args = {"weight": weight}, known.weights
    assert args is not None
    x = weight.view(len(weight), -1, args.group_size or weight.shape[1])
    if args.type == "float" and args.num_bits == 4:
        most = x.abs().amax(-1)
        if args.group_size == 32:
            state["weight_scale"] = torch.exp2(torch.floor(torch.log2(most)) - 2)
        else:
            state["weight_global_scale"] = (448 * 6 / weight.abs().amax()).reshape(1).float()
            state["weight_scale"] = most / 6 * state["weight_global_scale"]
    elif args.type == "float":
        state["weight_scale"] = x.abs().amax(-1) / 448
    else:
        symmetric = bool(args.symmetric)
        _, zeros, scales = round_groups(weight, args.num_bits, args.group_size or 0, symmetric=symmetric)
        state["weight_scale"] = scales.float()
        state["weight_zero_point"] = (zeros - (1 << (args.num_bits - 1))).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, known)
    wide = compressor.decompress(dict(packed), known)["weight"]
    if "weight_global_scale" in packed:  # it rounds to bfloat16 at the end
        rounded, wide = wide, nvfp4_weights(packed)
        assert torch.equal(wide.bfloat16(), rounded)
    return {f".{name}": tensor.contiguous() for name, tensor in packed.items()}, wide.float()


def nvfp4_weights(packed: Mapping[str, Tensor]) -> Tensor:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    outputs, half = packed["weight_packed"].shape
    values = unpack_fp4_from_uint8(packed["weight_packed"], outputs, 2 * half, dtype=torch.float32)
    scales = packed["weight_scale"].float() / packed["weight_global_scale"]
    return values * scales.repeat_interleave(16, 1)


def bnb4(weight: Tensor, kind: str = "nf4", *, nested: bool = False) -> Stored:
    import bitsandbytes.functional as F

    packed, state = F.quantize_4bit(weight.float(), quant_type=kind, blocksize=64, compress_statistics=nested)
    wide = F.dequantize_4bit(packed, state)
    parts = {f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {".weight": packed, **parts}, wide.float()


def bnb8(weight: Tensor) -> Stored:
    most = weight.float().abs().amax(1)
    numbers = (weight.float() * (127 / most)[:, None]).round().to(torch.int8)
    wide = numbers.float() * (most / 127)[:, None]
    return {".weight": numbers, ".SCB": most, ".weight_format": torch.zeros((), dtype=torch.uint8)}, wide


def torchao_bytes(weight: Tensor, bits: int = 8, group: int = 0, *, symmetric: bool = True) -> Stored:
    """As `Int8Tensor` (float32 scales) and `IntxUnpackedToInt8Tensor` are flattened."""
    dtype = torch.bfloat16 if group else torch.float32
    numbers, zeros, scales = round_groups(weight, bits, group, symmetric=symmetric, dtype=dtype)
    groups = torch.arange(weight.shape[1]) // (group or weight.shape[1])
    middle = 1 << (bits - 1)
    stored = {
        "._weight_qdata": (numbers - middle).to(torch.int8),
        "._weight_scale": scales,
        "._weight_zero_point": (zeros - middle).to(torch.int8),
    }
    return stored, widen(numbers, zeros, scales, groups)


def _float_zeros(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers of -8 to 7, bfloat16 scales and zero points [I/g, O], and the weight n * scale + zero."""
    numbers, zeros, scales = round_groups(weight, 4, group, symmetric=False, dtype=torch.bfloat16)
    shifts = ((8 - zeros) * scales.float()).to(torch.bfloat16)
    groups = torch.arange(weight.shape[1]) // group
    n = numbers - 8
    wide = n.float() * scales.float()[:, groups] + shifts.float()[:, groups]
    return n, scales.T.contiguous(), shifts.T.contiguous(), wide


def torchao_int4(weight: Tensor, group: int = 32) -> Stored:
    """As `Int4Tensor`: two numbers a byte, the first in the low half."""
    n, scales, zeros, wide = _float_zeros(weight, group)
    packed = (n[:, 1::2] << 4 | n[:, 0::2] & 15).to(torch.int8)
    return {"._weight_qdata": packed, "._weight_scale": scales, "._weight_zero_point": zeros}, wide


def torchao_tiles(weight: Tensor, group: int = 32) -> Stored:
    """As `Int4TilePackedTo4dTensor`: each word by the loop of `_convert_weight_to_int4pack` on a GPU."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // 8) * 8, -(-inputs // 1024) * 1024
    n, scales, zeros, wide = _float_zeros(weight, group)
    padded = torch.nn.functional.pad(n + 8, (0, columns - inputs, 0, rows - outputs)).numpy()
    pairs = (padded[:, ::2] << 4 | padded[:, 1::2]).astype(np.uint32)
    words = np.zeros((rows // 8, columns // 128, 32, 4), dtype=np.uint32)
    for lane in range(32):
        for word in range(4):
            at = np.arange(columns // 128) * 64 + word * 16 + lane % 4
            v = [pairs[lane // 4 :: 8][:, at + k] for k in (0, 4, 8, 12)]
            for i, pair in enumerate(v):
                words[:, :, lane, word] |= (pair >> 4) << (4 * i) | (pair & 15) << (16 + 4 * i)
    both = torch.stack((scales, zeros), -1)
    both = torch.nn.functional.pad(both, (0, 0, 0, rows - outputs, 0, columns // group - len(both)))
    packed = torch.from_numpy(words.view(np.int32))
    return {"._weight_qdata": packed, "._weight_scale_and_zero": both}, wide


def eetq(weight: Tensor) -> Stored:
    """In the order of EETQ's kernels for compute capability 7.5 to 8.9, a step of its preparation a line."""
    most = weight.float().abs().amax(1)
    scales = (most / 127).half()
    numbers = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    x_IO = numbers.T.contiguous().numpy()
    inputs, outputs = x_IO.shape
    rows = [16 * (r // 16) + 8 * (r % 4 // 2) + r % 2 + 2 * (r % 16 // 4) for r in range(inputs)]
    columns = np.ascontiguousarray(x_IO[rows].T).view(np.uint32)  # four inputs a word
    woven = np.zeros(columns.size, dtype=np.uint32)
    for column in range(outputs):
        for row in range(inputs // 4):
            to = 2 * (row // 16 * 16) + 16 * (column % 2) + row % 16
            woven[column // 2 * (inputs // 4) * 2 + to] = columns[column, row]
    biased = (woven.view(np.int8).astype(np.int16) + 128).astype(np.uint8).reshape(-1, 4)[:, [0, 2, 1, 3]]
    stored = torch.from_numpy(np.ascontiguousarray(biased).view(np.int8).reshape(inputs, outputs))
    return {".weight": stored, ".weight_scales": scales}, numbers.float() * scales.float()[:, None]


def bitnet(weight: Tensor, *, divides: bool) -> Stored:
    """As `transformers.integrations.bitnet.pack_weights`."""
    scale = weight.float().abs().mean().bfloat16().float()
    numbers = (weight.float() / scale).round().clamp(-1, 1)
    packed = torch.zeros(len(weight) // 4, weight.shape[1], dtype=torch.uint8)
    for place, quarter in enumerate((numbers + 1).to(torch.uint8).chunk(4)):
        packed |= quarter << 2 * place
    stored = (1 / scale).bfloat16() if divides else scale.bfloat16()
    wide = numbers * (1 / stored.float() if divides else stored.float())
    return {".weight": packed, ".weight_scale": stored.reshape(1)}, wide


def hqq(weight: Tensor, bits: int = 4, group: int = 64, axis: int = 1) -> Stored:
    """As `hqq.core` packs: a byte, or a word, holds numbers of rows far apart, the first one highest."""
    x = weight.float().reshape((-1, group) if axis else (group, -1))
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    most = (1 << bits) - 1
    scale = ((high - low) / most).half()
    zero = (-low / scale.float()).half()
    numbers = (x / scale.float() + zero.float()).round().clamp(0, most).int()
    wide = ((numbers.half() - zero) * scale).reshape(weight.shape)
    each = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    rows = torch.nn.functional.pad(numbers, (0, 0, 0, -len(numbers) % each)).chunk(each)
    words = torch.zeros_like(rows[0])
    for part in rows:
        words = words << bits | part
    stored = {
        ".W_q": words if bits == 3 else words.to(torch.uint8),
        ".scale": scale,
        ".zero": zero,
        ".shape": torch.tensor(weight.shape),
        ".nbits": torch.tensor(bits, dtype=torch.int32),
        ".packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
    }
    return stored, wide.float()


def mxfp4_blocks(weight: Tensor) -> Stored:
    """As gpt-oss stores an expert: bytes of 32 inputs apart."""
    scheme = {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}
    stored, wide = compressed(weight, scheme, "mxfp4-pack-quantized")
    outputs, inputs = weight.shape
    blocks = stored[".weight_packed"].view(outputs, inputs // 32, 16)
    return {"_blocks": blocks, "_scales": stored[".weight_scale"]}, wide


def publish(
    directory: Path,
    entry: Mapping[str, Any],
    store: Callable[[Tensor], Stored],
    keeps: tuple[str, ...] = (),
    others: Mapping[str, Callable[[Tensor], Stored]] | None = None,
) -> dict[str, Tensor]:
    """Turn a tiny model into a quantized one. Returns the weights that it stands for, by name, float32.

    others: stores of linears with these parts in their names.
    """
    weights = load_file(directory / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in weights.items()}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        if any(kept in name for kept in keeps):
            continue
        own = next((found for part, found in (others or {}).items() if part in name), store)
        stored, wide[name] = own(weights.pop(name))
        linear = name.removesuffix(".weight")
        weights |= {linear + end: tensor for end, tensor in stored.items()}
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": dict(entry)}))
    return wide


def scheme_of(bits: int, group: int = 0, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"weights": {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy, **more}}


def compressed_entry(scheme: Mapping[str, Any], form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, **scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def stored_weight(quant: Quant, outputs: int, inputs: int, *, ordered: bool = False) -> QuantizedWeight:
    """Random numbers of a format that only checkpoints have."""
    generator = torch.Generator().manual_seed(outputs)
    groups = quant.groups(inputs)
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5).to(scale_dtype(quant))
    zeros = torch.randint(0, 16, (outputs, groups), generator=generator, dtype=torch.uint8)
    most = 1 << (quant.bits - 1)
    codes = torch.randint(-most, most, (outputs, inputs), generator=generator, dtype=torch.int8)
    if quant.has_zeros:
        spread = zeros.repeat_interleave(quant.group, 1)[:, :inputs]
        codes = torch.randint(0, 16, codes.shape, generator=generator).to(torch.int8) - spread.to(torch.int8)
    if quant.is_e2m1:
        codes = torch.tensor(E2M1_DOUBLED, dtype=torch.int8)[(codes + 8).long()]
    order = torch.randperm(inputs, generator=generator).int() if ordered else None
    return QuantizedWeight(quant, codes, scales, zeros_OG=zeros if quant.has_zeros else None, order_I=order)
