"""Checksums of files: those of zlib, for every length and whatever came before."""

import random
import zlib

import pytest

from llmbox.kernels.dispatch import load_backend
from support.kernel_backends import backends

Sums = tuple[int, int]

FRESH: Sums = (0, 1)
LARGEST: Sums = (2**32 - 1, 65520 << 16 | 65520)
SIZES = [*range(1101), 16383, 16384, 16385, 50001]


@pytest.fixture(params=[name for name in backends() if name.startswith("cpu ")])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def checksums(name: str, data: bytes, before: Sums = FRESH, shift: int = 0) -> Sums:
    """Return the checksums of `data` at an address `shift` bytes behind an aligned one."""
    return load_backend(name).checksums(memoryview(bytearray(bytes(shift) + data))[shift:], *before)


def of_zlib(data: bytes, before: Sums = FRESH) -> Sums:
    return zlib.crc32(data, before[0]), zlib.adler32(data, before[1])


def test_they_are_those_of_zlib_at_every_length(name: str) -> None:
    rng = random.Random(5)
    for size in SIZES:
        for data in (rng.randbytes(size), b"\xff" * size, bytes(size)):
            for before in (FRESH, LARGEST):
                assert checksums(name, data, before, shift=1) == of_zlib(data, before), size


def test_they_do_not_depend_on_the_address(name: str) -> None:
    data = random.Random(6).randbytes(1500)
    assert {checksums(name, data, shift=shift) for shift in range(65)} == {of_zlib(data)}


@pytest.mark.parametrize(
    "data", [b"\xff" * 2**20, random.Random(7).randbytes(2**20)], ids=["largest", "random"]
)
def test_a_megabyte_whole_and_in_parts(name: str, data: bytes) -> None:
    assert checksums(name, data, LARGEST) == of_zlib(data, LARGEST)
    sums, rest, rng = FRESH, data, random.Random(8)
    while rest:
        size = rng.randrange(40000)
        sums, rest = checksums(name, rest[:size], sums), rest[size:]
    assert sums == of_zlib(data)
