"""Row counts that between them meet every variant of the products."""

import pytest
import torch

from llmbox.kernels.triton import gemm, linear, tiles

CPU = torch.device("cpu")
MOST = 2048
Variant = tuple[object, ...]


def integer_variant(rows: int, inputs: int, outputs: int) -> Variant:
    if rows > linear.TILED_ROWS:
        return ("cuBLAS",)
    tile = gemm.tile_for(CPU, rows, 2, fixed=False)
    return tile, rows >= gemm.WIDE_FROM, is_split(tile, rows, inputs, outputs)


def eight_bit_variant(rows: int, inputs: int, outputs: int) -> Variant:
    tile = tiles.tile_of_8_bits(CPU, rows)
    return tile, is_split(tile, rows, inputs, outputs)


def is_split(tile: tiles.Tile, rows: int, inputs: int, outputs: int) -> bool:
    programs = -(-rows // tile.rows) * -(-outputs // tile.columns)
    return gemm.num_splits(CPU, programs, -(-inputs // gemm.STEP)) > 1


@pytest.mark.parametrize(("capability", "multiprocessors"), [((9, 0), 132), ((8, 0), 108), ((8, 9), 20)])
@pytest.mark.parametrize("of", [integer_variant, eight_bit_variant])
def test_no_batch_meets_a_variant_that_the_counts_do_not(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], multiprocessors: int, of: object
) -> None:
    assert callable(of)
    monkeypatch.setattr(tiles, "capability", lambda _: capability)
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: multiprocessors)
    for outputs in (256, 1024, 3072, 4096, 24576):
        for inputs in (512, 1024, 12288):
            seen = {of(rows, inputs, outputs) for rows in range(1, MOST + 1)}
            counts = (*tiles.ROW_COUNTS, MOST)
            assert seen == {of(rows, inputs, outputs) for rows in counts}, (outputs, inputs)
