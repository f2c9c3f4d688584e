"""Blocks of GGUF files, taken apart: the numbers, scales and minimums that a block holds, as they are stored.

The layouts are those of ggml's `dequantize_row_*` (ggml-quants.c). N blocks, B bytes, L weights of a block, P
parts of a block with a byte of scales of their own.
"""

import zlib
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from llmbox.kernels.quant_formats import GGUF_QUANTS
from llmbox.kernels.weight_packing import E2M1_DOUBLED, BlockWeight, QuantizedWeight

from .reader import BLOCKS


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Parts of blocks: numbers n [N, L] uint8 (int8 where they are weights times a scale), and of each block
    a scale, a minimum, bytes of scales and bytes of minimums where its type has them.
    """

    numbers_NL: Tensor
    scale_N1: Tensor
    minimum_N1: Tensor | None = None
    scale_parts_NP: Tensor | None = None
    minimum_parts_NP: Tensor | None = None


def dequantize(kind: str, raw: Tensor) -> Tensor:
    """Dequantize the bytes of whole blocks to float32 [count], in order."""
    if kind in FLOATS:
        return raw.contiguous().view(FLOATS[kind]).float()
    if kind == "NVFP4":
        return _nvfp4_floats(raw.view(-1, BLOCKS[kind][1])).flatten()
    return unpack_rows(kind, raw, 1).floats().flatten()


def unpack_rows(kind: str, raw: Tensor, rows: int) -> BlockWeight | QuantizedWeight:
    """Take the bytes of a matrix apart, of a kind that `GGUF_QUANTS` has. Nothing is rounded."""
    quant, found = GGUF_QUANTS[kind], _FORMATS[kind](raw.view(-1, BLOCKS[kind][1]))

    def by_rows(parts: Tensor | None) -> Tensor | None:
        return None if parts is None else parts.reshape(rows, -1)

    numbers_OI, scales_OU = found.numbers_NL.reshape(rows, -1), found.scale_N1.reshape(rows, -1)
    if not quant.grid:
        return QuantizedWeight(quant, numbers_OI, scales_OU)
    parts = map(by_rows, (found.minimum_N1, found.scale_parts_NP, found.minimum_parts_NP))
    return BlockWeight(quant, numbers_OI, scales_OU, *parts)


def _half(block_NB: Tensor, at: int) -> Tensor:
    """Read the float16 at a byte offset of each block, [N, 1]."""
    return block_NB[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(bytes_NB: Tensor) -> Tensor:
    """Unpack nibbles: all low ones, then all high ones."""
    return torch.cat((bytes_NB & 15, bytes_NB >> 4), 1)


def _bits(bytes_NB: Tensor) -> Tensor:
    """Unpack bits: [N, B] -> [N, 8 B], the lowest bit of each byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bytes_NB.unsqueeze(-1) >> shifts & 1).flatten(1)


def _fields(bytes_NB: Tensor, width: int) -> Tensor:
    """Unpack bit fields: [N, B] -> [N, 8 / width, B], the bits at 0, at `width`, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(1, -1, 1)
    return bytes_NB.unsqueeze(1) >> shifts & (1 << width) - 1


def _q4_0(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 2:]).view(torch.int8) - 8, _half(b, 0))


def _q4_1(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2))


def _q5_0(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4, _half(b, 0))


def _q5_1(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4, _half(b, 0), _half(b, 2))


def _q8_0(b: Tensor) -> Unpacked:
    return Unpacked(b[:, 2:].contiguous().view(torch.int8), _half(b, 0))


def _mxfp4(b: Tensor) -> Unpacked:
    """Take MXFP4 apart: doubled E2M1 numbers, and half the power of two that a byte names."""
    numbers = torch.tensor(E2M1_DOUBLED, dtype=torch.int8)[_nibbles(b[:, 1:]).int()]
    return Unpacked(numbers, torch.ldexp(torch.ones(len(b), 1), b[:, :1].int() - 128))


def _quarters(bytes_NB: Tensor) -> Tensor:
    """Unpack 64 bytes of 2-bit numbers to [N, 256]: in each half all lowest bits first, then the next."""
    return _fields(bytes_NB.reshape(-1, 32), 2).reshape(len(bytes_NB), 256)


def _q2_k(b: Tensor) -> Unpacked:
    return Unpacked(_quarters(b[:, 16:80]), _half(b, 80), _half(b, 82), b[:, :16])


def _q3_k(b: Tensor) -> Unpacked:
    """Take Q3_K apart. Third bits are in the first 32 bytes: bit k is that of the k-th 32 weights."""
    third_NL = _fields(b[:, :32], 1).reshape(-1, 256)
    low_NP = _fields(b[:, 96:104], 4).reshape(-1, 16)
    high_NP = _fields(b[:, 104:108], 2).reshape(-1, 16)
    parts = (low_NP | high_NP << 4).view(torch.int8) - 32
    return Unpacked(_quarters(b[:, 32:96]) | third_NL << 2, _half(b, 108), None, parts.view(torch.uint8))


def _k_parts(b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unpack the scales of Q4_K and Q5_K: scale, minimum, and 6-bit numbers [N, 8] of both in 12 bytes."""
    first, second, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale_NP = torch.cat((first & 63, last & 15 | first >> 6 << 4), 1)
    minimum_NP = torch.cat((second & 63, last >> 4 | second >> 6 << 4), 1)
    return _half(b, 0), _half(b, 2), scale_NP, minimum_NP


def _halves(bytes_NB: Tensor) -> Tensor:
    """Unpack nibbles to [N, 8, 32]: of each 32 bytes, low nibbles are one group, high ones the next."""
    return _fields(bytes_NB.reshape(-1, 32), 4).reshape(len(bytes_NB), 8, 32)


def _q4_k(b: Tensor) -> Unpacked:
    return Unpacked(_halves(b[:, 16:]).flatten(1), *_k_parts(b))


def _q5_k(b: Tensor) -> Unpacked:
    return Unpacked((_halves(b[:, 48:]) | _fields(b[:, 16:48], 1) << 4).flatten(1), *_k_parts(b))


def _q6_k(b: Tensor) -> Unpacked:
    low = _fields(b[:, :128].reshape(-1, 64), 4)  # of each half: 64 low nibbles, 64 high ones
    high = _fields(b[:, 128:192].reshape(-1, 32), 2)
    numbers = low.reshape(len(b), 256) | high.reshape(len(b), 256) << 4
    return Unpacked(numbers, _half(b, 208), None, b[:, 192:208])


def _iq4_nl(b: Tensor) -> Unpacked:
    return Unpacked(_nibbles(b[:, 2:]), _half(b, 0))


def _iq4_xs(b: Tensor) -> Unpacked:
    low_NP = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), 2).flatten(1)
    high_NP = torch.stack([b[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    parts = (low_NP | high_NP << 4).view(torch.int8) - 32
    numbers = _fields(b[:, 8:].reshape(-1, 16), 4).reshape(len(b), 256)
    return Unpacked(numbers, _half(b, 0), None, parts.view(torch.uint8))


def _ternary(numbers_NL: Tensor, scale_N1: Tensor) -> Unpacked:
    """Numbers 0 to 2 stand for -1 to 1, with a scale for 256 of them."""
    return Unpacked(numbers_NL, scale_N1.expand(-1, 8))


def _tq1_0(b: Tensor) -> Unpacked:
    """Take TQ1_0 apart: five numbers of three values in a byte, in two stretches, then four in a byte."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).view(1, -1, 1)
    stretches = (b[:, :32], powers), (b[:, 32:48], powers), (b[:, 48:52], powers[:, :4])
    digits = torch.cat([(part.unsqueeze(1) * times).flatten(1) for part, times in stretches], 1)
    return _ternary((digits.short() * 3 >> 8).to(torch.uint8), _half(b, 52))


def _tq2_0(b: Tensor) -> Unpacked:
    return _ternary(_quarters(b[:, :64]), _half(b, 64))


def _words(block_NB: Tensor, first: int, end: int, width: int) -> Tensor:
    """Read the bytes from `first` to `end` as unsigned words of `width` bytes: int64 [N, words]."""
    parts = block_NB[:, first:end].reshape(len(block_NB), -1, width).long()
    return (parts << torch.arange(0, 8 * width, 8)).sum(-1)


def _shifted(words_NW: Tensor, *shifts: int) -> Tensor:
    """Shift each word to the right by each of the shifts: [N, W] -> [N, W * shifts]."""
    return (words_NW.unsqueeze(-1) >> torch.tensor(shifts, dtype=words_NW.dtype)).flatten(1)


@cache
def _patterns(name: str) -> Tensor:
    """Return the rows of a table of patterns: uint8 [patterns, places], the number of a value each."""
    values, places = (3, 8) if name.startswith(("IQ1", "IQ2")) else (8, 4)
    bits = _bits(
        torch.frombuffer(bytearray(zlib.decompress(b64decode(_PATTERNS[name]))), dtype=torch.uint8)[None]
    )
    rows = bits[0].nonzero()
    return (rows // torch.tensor([values**place for place in range(places)]) % values).to(torch.uint8)


def _signed(name: str, index_NG: Tensor, signs_NL: Tensor) -> Tensor:
    """Return the places of values in their table: those of patterns, mirrored where a sign is set."""
    found = _patterns(name)[index_NG].flatten(1)
    half = 3 if name.startswith("IQ2") else 8
    return torch.where(signs_NL.bool(), half - 1 - found, half + found)


def _even_signs(words_NW: Tensor) -> Tensor:
    """Unpack signs of which seven of eight are stored: the last makes their number even."""
    seven = words_NW.unsqueeze(-1) >> torch.arange(7) & 1
    return torch.cat((seven, seven.sum(-1, keepdim=True) & 1), -1).flatten(1)


def _odd_parts(scales_NP: Tensor) -> Tensor:
    """Return the bytes 2 s + 1 of scales that are stored as s."""
    return (2 * scales_NP + 1).to(torch.uint8)


def _iq1_numbers(index_NG: Tensor, is_lower_NG: Tensor) -> Tensor:
    """Values -1 to 1 of patterns, each with an eighth added or, for a pattern that is lower, taken off."""
    found = 2 * _patterns("IQ1")[index_NG] + (is_lower_NG == 0).unsqueeze(-1)
    return found.to(torch.uint8).flatten(1)


def _iq1_s(b: Tensor) -> Unpacked:
    high = _words(b, 34, 50, 2)
    index = b[:, 2:34].long() | (_shifted(high, 0, 3, 6, 9) & 7) << 8
    numbers = _iq1_numbers(index, (high >> 15).repeat_interleave(4, 1))
    return Unpacked(numbers, _half(b, 0), None, _odd_parts((high >> 12 & 7).repeat_interleave(2, 1)))


def _iq1_m(b: Tensor) -> Unpacked:
    """Take IQ1_M apart: its scale is in the four highest bits of four words."""
    words, high = _words(b, 48, 56, 2), _shifted(b[:, 32:48].long(), 0, 4)
    scale = ((words >> 12) << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    halves = torch.stack((scale & 255, scale >> 8), 2).flatten(1).to(torch.uint8)
    numbers = _iq1_numbers(b[:, :32].long() | (high & 7) << 8, high & 8)
    return Unpacked(numbers, _half(halves, 0), None, _odd_parts(_shifted(words, 0, 3, 6, 9) & 7))


def _iq2_xxs(b: Tensor) -> Unpacked:
    words = _words(b, 2, 66, 4).view(len(b), 8, 2)
    index, signs = _shifted(words[..., 0], 0, 8, 16, 24) & 255, _shifted(words[..., 1], 0, 7, 14, 21) & 127
    parts = _odd_parts((words[..., 1] >> 28).repeat_interleave(2, 1))
    return Unpacked(_signed("IQ2_XXS", index, _even_signs(signs)), _half(b, 0), None, parts)


def _iq2_xs(b: Tensor) -> Unpacked:
    words = _words(b, 2, 66, 2)
    numbers = _signed("IQ2_XS", words & 511, _even_signs(words >> 9))
    return Unpacked(numbers, _half(b, 0), None, _odd_parts(_shifted(b[:, 66:], 0, 4) & 15))


def _iq2_s(b: Tensor) -> Unpacked:
    index = b[:, 2:34].long() | (_shifted(b[:, 66:74].long(), 0, 2, 4, 6) & 3) << 8
    numbers = _signed("IQ2_S", index, _bits(b[:, 34:66]))
    return Unpacked(numbers, _half(b, 0), None, _odd_parts(_shifted(b[:, 74:], 0, 4) & 15))


def _iq3_xxs(b: Tensor) -> Unpacked:
    words = _words(b, 66, 98, 4)
    signs = _even_signs(_shifted(words, 0, 7, 14, 21) & 127)
    numbers = _signed("IQ3_XXS", b[:, 2:66].long(), signs)
    return Unpacked(numbers, _half(b, 0), None, _odd_parts(words >> 28))


def _iq3_s(b: Tensor) -> Unpacked:
    index = b[:, 2:66].long() | _bits(b[:, 66:74]).long() << 8
    numbers = _signed("IQ3_S", index, _bits(b[:, 74:106]))
    return Unpacked(numbers, _half(b, 0), None, _odd_parts(_shifted(b[:, 106:], 0, 4) & 15))


def _nvfp4_floats(b: Tensor) -> Tensor:
    """Dequantize NVFP4: [N, 64]. Each 16 weights have a scale of E4M3, of which 127 stands for 0."""
    power, part = (b[:, :4] >> 3 & 15).int(), (b[:, :4] & 7).float()
    scales = torch.ldexp(torch.where(power > 0, 8 + part, 2 * part), power - 11)
    scales_NP1 = torch.where(b[:, :4] == 127, 0, scales).unsqueeze(-1)
    numbers = torch.tensor(E2M1_DOUBLED, dtype=torch.float32)[_fields(b[:, 4:].reshape(-1, 8), 4).int()]
    return (scales_NP1 * numbers.view(len(b), 4, 16)).flatten(1)


FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMATS: Final[dict[str, Callable[[Tensor], Unpacked]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
_PATTERNS: Final = {
    "IQ1": (
        "eNotUkFLnEcYfneq4XVMZWM/QXJ696ux01kR6y3pZZFdWPRiQvIHPNm0SMk5TT4nu+mX2RRCILQ0l3EwyTgNq/FQtp+wAU9Wem"
        "jprQdpPYS6HgJeGgzEzK69zbzwvM/zvM9z7UJUN2zmMlY+c3dJ2/MoKarPR4rKlQsj/YYpSkcBlflAmnTL8wd+EGLg/r4yWAqo"
        "QprMRwGup/AHg4kMk6hO1ZlrWMlNbBvS4yDHnLe4v44oBAQu4QW5hPhj/CVztNu8Z5v+0s3DTralhlpxtvvn0EMWQ0xOZ1wxBD"
        "n7t/08pqKF5dKy1wLjXFA4omigUrhaN8g+dpeopuhqkGEJH81HTGLLqcRUGaGyi5aJnyTWw3sKKyXoKjQwcxkquU8VaCVxZSrq"
        "D5bFqXjGyEug4Re6KVy24t3XoDgyEbMaKKgmprMh/TY1srjz17NGY8k9DP8bDV0+K6laKwkt0dPObza26z+afx0DBtKlQIlpWC"
        "syk6hpnrVb2btDa4oWNRcdCyvT7OzxamfvddFNfte+dXj83+2Xr77J9r54+8nJy/Hj4YN/dJz37aGax003qJon2djBnaRvYWLx"
        "yPHVIgTLuO+HgSnJn9Kv6t4DJcDC/eQjUIjwlfZ+iz1ta7PLki+/n/x98yCv8pN+T4z88aQPePcOhLkVUv5iFk/XzEAyCtousO"
        "WoHA5VeK56KXsS/ls+3Eu532C3NjlipmRjSAEtXtdLLe8TIK72d+IClruoAU0joVF3OXopE+BdVMFBb+E+pYqPhgi89XqjwbgM"
        "FCrxXKCAtZTFpj0oWqizuc1gefVN09MVsfizmXqVcBaacH0hFIl5X/Qdu2YsYp6MjkENnabMexVdOwOznuETyH9Y/j/l/lBp9f"
        "yIACBw8Yw6loGqDoiDCM7NVbrdcKynMB3DVPAShkmwzLoLc+8B4wUZaQ=="
    ),
    "IQ2_XXS": (
        "eNp1UkuqxDAMk8Hdq5B3Hwd6gG7m/ld5tvPt0BENpLHkSG4/f+XDq1ZouUAAaigwxA64afWEFLXbz718+LoBQVCqn5eSxPakiu"
        "goSjpNT6j4xkLlkEakmrdsKvaVVzQcEqXwcY6jlFtvHa9ytE5NdA8erHrVBlu7ptfiaQ4UTzR7t0+D9Mhgk18I792/MWkMozOp"
        "YEUGZTWnjKHk4pUeVVKiD+3yaLJ11MlR6vJsezlRkya9ZIuWJs+Vsrxm3zJ8I6bZP4XaFM4G+dvYCpk35szlEWu/YcUTjjHsvj"
        "FmaK+qB/ijNp18T/Nl/wr9TfsHxl0VIw=="
    ),
    "IQ2_XS": (
        "eNpdUVuuhTAIHBL6j4nuhyb2vyZ2/1s5PFr13uYcxQLDzDDGuEarR6N7jN6qFMJ9iVYGEbqnDtoZlkIhZkArpNjLfqNsO5NA1b"
        "o8JYAFBDtigJd16QK0VEffvNELHLCRJGDcOCavsBSwVdr3Ft8MzBI/YyQguItPFR+YrVZ4Vig91ZxJmsCQSjFFFqbnQF6FMyWH"
        "rikZp8mrtADNKEt5SwnyPsOM0miHp4hoTq0xX7HOtDckM8rDMHs17BW3p+aFYCbtz+aGBpShy2TzehJuiNPq30xqNOkvCWeIZy"
        "g+If0x2t8iIbnQwY7bDyOfokOFu1z32/oVuavEmHEw5Vjp7gI+vAKcOd2IzVCwoLfAQE4LqnxJ7h+iL1v+XMoqbTQn0uOl7msK"
        "r70o/h/N4W2uYLIu79Po/gBOsClJ"
    ),
    "IQ2_S": (
        "eNptUl2KBiEMa0HfK+h9KozvCvb+V9m0OrvfsivD/MXEJGpmy4a1XPAyh9Xc6l4yLVEpeAwza3usaVZxAVJAq6YppM2cJcyaLT"
        "2AlIirZCEipW1rQbmtui2WsEqz9p4y1US+1ivoUAjWzIBAV1vJISY6EP4lcShBm/Zqq+fEhfbsmg9LaCXMz/QgxS/BAkpmUINc"
        "YMOXIGrxTSGOT9yYpnu1Vh9vI1+HvSWP7L7MthfV6UCzvw4hIPVAsBEstKF0IB8QbMGiP5Er4HetD0G65iMyICUE/BGMWiLJM1"
        "qGQ/VNuR2K20hOIF6fghIY3ex4n3JL4FPLO2KGahul7iKdaRzznbS0y8IuF4+cfyKzQ/OKg5U5ZHDnVx3K2c/KMLms2JRQPAfA"
        "Kf90WOQ7NiDh02sg9DEwGad3h46fCTlhJKkX/TCtK8h6O/yVGdg1ylcNv5Ur35q+ALm8Vh4="
    ),
    "IQ3_XXS": (
        "eNpNUTEOwjAMPFuxVGUKQ/eKCfGKdGCHH0WdEK9g5Jn4nKZwVdUmPt+dk/llmoBLtrNpgcxqL2xYNlvgEExopeGyAckfwgsFeM"
        "BLimx5bgKYWhSzqa+QDKIVFeeu4jj5ChqqgRTblm/0xzX6nmKbNXGSntCb6DfRq7kbjTtyjSBQy66/hN+d+2xmUmVXQJrvrAzP"
        "hsIYUZoYzGd743mEKqQLVncbdJqUEUMGcbH932U9l6yoo4HjpLQ7QEI8ddpIhIPI7z1ctL8Nw3X9CxXSe8Mevst9ZNxL7bIcM/"
        "FIRlwNpv2O7piB+AIWuhT2"
    ),
    "IQ3_S": (
        "eNotUcFKw0AQfTPMwmZPuyHiNd1GqPmKrdSDeimC+DtpqdD2luIHiFYE+5PObpzDwLw3897b5Od1br+dOV3PD9EjytdDDGeHyk"
        "bz6M0QaV9LxaAG9/YTySYHhoCvdEYAri/mGWuWp8AVGyzpHKRqSU7VNugiLRq4le4VlqE1Yq3dGW4zf3k5mt4Mt+bQ1aL8CW7D"
        "e9Q33DihhC2qTuHOswxkQW9ZRC9bTmQJkF/p39ly7x0ItCLRqIpzONKxhbV3qioBbFrxCRYJJYaDaXOaIKOwHu6czGxUfMaWBi"
        "HvTMy8gR+y3Ee5EqiCRzaYgaxCEgSjJN8LS14gtkvdwY4GeG5tDZKUhXJ3KJUXm9K1+oxqAGx08Jn00gqR5+yipY9QsMLkm0MX"
        "/F9rhEnkBcIeC53rpb6Gi0eXc8T8kWhylcm7/IVJG/gDusYnIA=="
    ),
}
"""Patterns of ggml's tables (iq1s_grid, iq2xxs_grid and so on in ggml-common.h). A pattern is a number whose
digits, the lowest first, name values, and a table has its patterns in ascending order. A bit for each number
says whether the table has it, the lowest first; in zlib and base64.
"""
