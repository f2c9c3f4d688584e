"""llama.cpp's quantizer, from its own library: what it makes of a weight, and of which weights.

The bytes never leave memory: a weight is rounded by `ggml_quantize_chunk` and made float32 again by
its type's `to_float`.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

TYPES = {"Q4_0": 2, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
"""Of `enum ggml_type`."""
SUPER_BLOCK = 256
"""Inputs that a K type rounds together; rows of other lengths it does not take."""
INSTEAD = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What llama-quantize takes for rows that are no multiple of it."""
MIXES = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K", "Q4_K_M": "Q4_K"}
"""Files that llama-quantize makes, and the type of most linears in them. "Q4_K" it does not make: of all."""

ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Traits(ctypes.Structure):
    """`struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ToFloat),
        ("from_float", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Wide:
    """A weight that was rounded, as float32, and the bits that it takes rounded."""

    weight_OI: Tensor
    bits: float
    """All of them."""


class Ggml:
    def __init__(self, folder: Path) -> None:
        """`folder` has llama.cpp's libraries. Raises OSError."""
        self._library = library = ctypes.CDLL(str(folder / "libggml-base.so"))
        library.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
        library.ggml_quantize_chunk.restype = ctypes.c_size_t
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.ggml_quantize_chunk.argtypes = [
            ctypes.c_int,
            pointer,
            pointer,
            number,
            number,
            number,
            pointer,
        ]

    def rounded(self, weight_OI: Tensor, name: str) -> Wide:
        """Rows must be a multiple of the type's block."""
        traits = self._traits(name)
        outputs, inputs = weight_OI.shape
        assert inputs % traits.block == 0
        weight = weight_OI.float().contiguous()
        packed = torch.empty(weight.numel() // traits.block * traits.block_bytes, dtype=torch.uint8)
        written = self._library.ggml_quantize_chunk(
            TYPES[name], weight.data_ptr(), packed.data_ptr(), 0, outputs, inputs, None
        )
        assert written == packed.nbytes
        wide = torch.empty_like(weight)
        traits.to_float(packed.data_ptr(), wide.data_ptr(), weight.numel())
        return Wide(wide, packed.nbytes * 8)

    def padded(self, weight_OI: Tensor, name: str) -> Wide:
        """The same of rows filled with zeros to whole super-blocks. Their bits are not counted."""
        inputs = weight_OI.shape[1]
        filled = self.rounded(F.pad(weight_OI, (0, -inputs % SUPER_BLOCK)), name)
        share = inputs / filled.weight_OI.shape[1]
        return Wide(filled.weight_OI[:, :inputs].contiguous(), filled.bits * share)

    def _traits(self, name: str) -> Traits:
        traits: Traits = self._library.ggml_get_type_traits(TYPES[name]).contents
        told = traits.type_name.decode()
        if told.upper() != name:
            raise OSError(f"this libggml's type {TYPES[name]} is {told}, not {name}: its list has changed")
        return traits


def type_in(mix: str, name: str, layers: int, inputs: int | None = None) -> str:
    """Of the tensor that a checkpoint calls `name`, in a dense model whose head is its table.

    As llama.cpp's `llama_tensor_get_type_impl` decides without an importance matrix. `inputs`: of the tensor,
    for the type that its shape admits; None where it is padded.
    """
    usual = MIXES[mix]
    if "embed_tokens" in name:
        found = usual if usual == "Q8_0" else "Q6_K"
    elif mix == "Q4_K_M" and ("v_proj" in name or "down_proj" in name):
        found = "Q6_K" if has_more_bits(int(name.split(".")[2]), layers) else usual
    else:
        found = usual
    fits = inputs is None or inputs % SUPER_BLOCK == 0
    return found if fits else INSTEAD.get(found, found)


def has_more_bits(layer: int, layers: int) -> bool:
    """`use_more_bits`: the first and the last eighth, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
