"""Row counts that between them meet every variant of the products."""

import pytest
import torch

from llmbox.kernels.triton.attention.attention_combine import FEW_SPLITS
from llmbox.kernels.triton.attention.attention_metadata import TritonAttentionMetadata, num_splits
from llmbox.kernels.triton.linear import fused_moe as gemm_experts
from llmbox.kernels.triton.linear import gemm, linear
from llmbox.kernels.triton.linear import tile_config as tiles

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


@pytest.mark.parametrize("most", [300, 700, 1500, 3000, 8192])
@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (64, 8), (128, 8), (256, 8), (512, 8), (512, 10)])
def test_no_step_of_a_mixture_meets_a_tile_that_the_counts_do_not(
    monkeypatch: pytest.MonkeyPatch, count: int, chosen: int, most: int
) -> None:
    monkeypatch.setattr(tiles, "capability", lambda _: (9, 0))

    def variant(rows: int) -> Variant:
        each = rows * chosen // count
        return gemm_experts.tile_for(CPU, each, 2), each > gemm_experts.MANY

    counts = [*(rows for rows in tiles.ROW_COUNTS if rows < most), most]
    assert {variant(rows) for rows in range(1, most + 1)} == {variant(rows) for rows in counts}


@pytest.mark.parametrize("context", [100, 900, 40960])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 10, 32, 64])
def test_no_batch_brings_pieces_together_as_none_of_the_counts_does(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, context: int
) -> None:
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: 132)

    def program(decoding: int) -> bool | None:
        """Of `reduce_splits`: for few pieces; None: there is one."""
        pieces = num_splits(TritonAttentionMetadata(None, None, decoding, context, False), kv_heads, CPU)
        return None if pieces == 1 else pieces <= FEW_SPLITS

    for most in (1, 3, 40, 70, 256, 500):
        counts = [*(count for count in tiles.ROW_COUNTS if count < most), most]
        assert {program(rows) for rows in range(1, most + 1)} == {program(rows) for rows in counts}, most
