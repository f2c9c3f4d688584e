import itertools
import math

import pytest

from support.noise import philox_4x32, uniform

# Known answers published with the Random123 library (philox 4x32, 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox_4x32(counter, key) == words


def test_uniform_takes_53_bits_of_the_first_two_words():
    word = 0xE169C58D << 32 | 0x6627E8D5
    assert uniform(0, 0) == (word >> 11) / 2**53


def test_values_never_change():
    """Recorded requests are replayed by seed: these are a promise."""
    assert [round(uniform(seed, 5), 12) for seed in (0, 1, -1, 2**63 - 1)] == [
        0.027749430959,
        0.29557739621,
        0.8414333026,
        0.604072962692,
    ]


def test_seeds_and_positions_all_differ():
    seeds = (0, 1, 2**32, -1, -(2**63), 2**63 - 1)
    values = {uniform(seed, position) for seed in seeds for position in (0, 1, 2, 131_071)}
    assert len(values) == len(seeds) * 4


def test_uniform_fills_the_unit_interval_evenly():
    count, cells = 20_000, 64
    for draw in (lambda i: uniform(7, i), lambda i: uniform(i, 7)):
        values = [draw(i) for i in range(count)]
        assert all(0 <= value < 1 for value in values)
        hits = [0] * cells
        for value in values:
            hits[int(value * cells)] += 1
        expected = count / cells
        chi_square = sum((hit - expected) ** 2 / expected for hit in hits)
        assert chi_square < cells - 1 + 4 * math.sqrt(2 * (cells - 1))


def test_neighboring_positions_are_uncorrelated():
    values = [uniform(3, i) - 0.5 for i in range(20_000)]
    correlation = sum(a * b for a, b in itertools.pairwise(values)) / len(values) * 12
    assert abs(correlation) < 4 / math.sqrt(len(values))
