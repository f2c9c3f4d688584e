"""Operations of adapters on GPUs beside the formula, and a row's bits whatever is beside it."""

import pytest
import torch
from torch import Tensor

from llmbox.kernels.lora import LoraPiece, LoraSite, LoraTiles, LoraWeights, reference_lora
from llmbox.kernels.triton.linear.lora import SPLIT, TritonLora

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 123, 150


def weights(rank: int, dtype: torch.dtype, seed: int, inputs: int = INPUTS) -> LoraWeights:
    """Two parts with other ranks; the outputs between them have none."""
    torch.manual_seed(seed)
    pieces = (
        LoraPiece(0, 70, 0, torch.randn(70, rank).to(dtype)),
        LoraPiece(80, OUTPUTS, rank, torch.randn(OUTPUTS - 80, 3).to(dtype)),
    )
    return LoraWeights(torch.randn(rank + 3, inputs).to(dtype) / 8, torch.rand(rank + 3), pieces)


def tiles_of(slots: list[int], padding: int = 0) -> LoraTiles:
    numbers = LoraTiles.numbers((slot, range(row, row + 1)) for row, slot in enumerate(slots))
    tiles = torch.tensor(numbers, dtype=torch.int32).view(-1, 17)
    return LoraTiles(torch.cat((tiles, torch.full((padding, 17), -1, dtype=torch.int32))))


def loaded(adapters: dict[int, LoraWeights]) -> LoraSite:
    site = LoraSite()
    ops = TritonLora(CPU).ops()
    for slot, adapter in adapters.items():
        ops.load(site, slot, adapter)
    return site


def added(site: LoraSite, x: Tensor, y: Tensor, tiles: LoraTiles) -> Tensor:
    y = y.clone()
    TritonLora(CPU).ops().add(site, x, y, tiles)
    return y


def expected(adapters: dict[int, LoraWeights], x: Tensor, y: Tensor, tiles: LoraTiles) -> Tensor:
    """In float32, as the kernels keep sums."""
    site, reference = LoraSite(), reference_lora()
    for slot, adapter in adapters.items():
        reference.load(site, slot, adapter)
    y = y.float().clone()
    reference.add(site, x, y, tiles)
    return y


@pytest.mark.parametrize(
    ("dtype", "results"),
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("inputs", [INPUTS, SPLIT + 200])
def test_adapters_of_a_batch(dtype: torch.dtype, results: torch.dtype, inputs: int) -> None:
    """Ranks of several programs, strided rows, tiles that are none, slots with nothing here."""
    adapters = {slot: weights(rank, dtype, slot, inputs) for slot, rank in ((0, 1), (5, 8), (63, 40))}
    site = loaded(adapters)
    tiles = tiles_of([(-1, 0, 5, 63, 5, 9)[row % 6] for row in range(40)] + [63] * 20, padding=3)
    x, y = torch.randn(60, inputs + 5).to(dtype)[:, :inputs], torch.randn(60, OUTPUTS).to(results)
    wanted = expected(adapters, x, y, tiles)
    found = added(site, x, y, tiles)
    torch.testing.assert_close(found.float(), wanted, atol=2e-3, rtol=2e-3)
    assert torch.equal(found[:, 70:80], y[:, 70:80]), "outputs without an adapter keep their bits"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    adapters = {slot: weights(14 + slot, dtype, slot) for slot in range(4)}
    site = loaded(adapters)
    slots = [(0, 1, 2, 3, -1)[row % 5] for row in range(37)] + [2] * 30
    x, y = torch.randn(67, INPUTS).to(dtype), torch.randn(67, OUTPUTS).to(dtype)
    together = added(site, x, y, tiles_of(slots))
    for row in (0, 4, 7, 36, 50, 66):
        alone = added(site, x[row : row + 1], y[row : row + 1], tiles_of([slots[row]]))
        assert torch.equal(alone[0], together[row])
    loaded_later = loaded({**adapters, 9: weights(100, dtype, 9)})  # launches are made for more ranks
    assert torch.equal(added(loaded_later, x, y, tiles_of(slots)), together)


def test_many_tiles_are_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = {slot: weights(2, torch.float32, slot) for slot in range(5)}
    site, tiles = loaded(adapters), tiles_of([0, 1, 2, 3, 4])
    x, y = torch.randn(5, INPUTS), torch.randn(5, OUTPUTS)
    together = added(site, x, y, tiles)
    monkeypatch.setattr("llmbox.kernels.triton.linear.lora.TILES", 2)
    assert torch.equal(added(site, x, y, tiles), together)


def test_slots_are_filled_and_emptied_at_one_address() -> None:
    """Graphs hold the address of the table, and the number of ranks that they launch programs for."""
    lora = TritonLora(CPU).ops()
    site, rows = LoraSite(), tiles_of([1, 1])
    x, y = torch.randn(2, INPUTS), torch.randn(2, OUTPUTS)
    assert torch.equal(added(site, x, y, rows), y)
    before = lora.launches()
    lora.load(site, 1, weights(4, torch.float32, 1))
    assert site.on_device is not None
    assert lora.launches() > before, "there were no launches for this linear"
    before, address = lora.launches(), site.on_device.data_ptr()
    lora.load(site, 2, weights(12, torch.float32, 2))
    assert lora.launches() == before, "as many programs serve it"
    lora.unload(site, 1)
    assert torch.equal(added(site, x, y, rows), y)
    lora.load(site, 1, weights(64, torch.float32, 1))
    assert (site.on_device.data_ptr(), lora.launches()) == (address, before + 1)
    assert not torch.equal(added(site, x, y, rows), y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_embeddings_of_an_adapter(dtype: torch.dtype) -> None:
    lora = TritonLora(CPU).ops()
    site, table = LoraSite(), torch.randn(50, 72).to(dtype)
    ids, x = torch.tensor([4, 9, 49]), torch.randn(3, 72).to(dtype)
    kept = x.clone()
    lora.embed(site, ids, x, 2.0, tiles_of([3, -1, 3], padding=1))
    assert torch.equal(x, kept)
    lora.load_table(site, 3, table)
    lora.embed(site, ids, x, 2.0, tiles_of([3, -1, 3], padding=1))
    assert torch.equal(x[1], kept[1])
    torch.testing.assert_close(x[[0, 2]], (table[[4, 49]].float() * 2).to(dtype))


def test_no_rows_have_more_tiles_than_a_graph_has_room_for() -> None:
    for rows in (1, 15, 16, 17, 64, 65, 80, 300):
        for adapters in (1, 2, 63, 64):
            slots = [min(row, adapters - 1) for row in range(rows)]
            assert len(tiles_of(slots).tiles) <= LoraTiles.most(rows)
