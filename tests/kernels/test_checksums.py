"""Checksums of files: those of zlib, for every length and whatever came before."""

import random
import zlib

import pytest

from llmbox.kernels.dispatch import load_backend
from support.kernel_backends import backends

SIZES = [0, 1, 15, 16, 17, 63, 64, 65, 95, 128, 255, 256, 257, 511, 512, 1000, 16383, 16384, 16385, 50001]


@pytest.mark.parametrize("name", [name for name in backends() if name.startswith("cpu ")])
def test_they_are_those_of_zlib(name: str) -> None:
    checksums, rng = load_backend(name).checksums, random.Random(5)
    for size in SIZES:
        for data in (rng.randbytes(size), b"\xff" * size, bytes(size)):
            for crc, adler in ((0, 1), (rng.getrandbits(32), 65520 << 16 | 65520)):
                found = checksums(memoryview(bytearray(b"x" + data))[1:], crc, adler)
                assert found == (zlib.crc32(data, crc), zlib.adler32(data, adler)), (size, crc)
