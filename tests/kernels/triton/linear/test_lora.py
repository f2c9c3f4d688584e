"""Operations of adapters on GPUs beside the formula, and a row's bits whatever is beside it."""

import pytest
import torch
from torch import Tensor

from llmbox.kernels.lora import (
    TILE_ROWS,
    LoraPiece,
    LoraSite,
    LoraTiles,
    LoraWeights,
)
from llmbox.kernels.op_types import Routing
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.reference.lora import reference_lora
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.linear import fused_moe
from llmbox.kernels.triton.linear.fused_moe import sort_experts
from llmbox.kernels.triton.linear.lora import SPLIT, TritonLora
from support.mixed_experts import COUNT, HIDDEN, MixedExperts

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
    monkeypatch.setattr("llmbox.kernels.triton.linear.lora.LOW_BYTES", 2 * 16 * 16 * 4)
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


def slots_of_many(rows: int) -> list[int]:
    """Rows of adapters of some experts and of all, of one that is not here, and of none."""
    return [(-1, 0, 5, 63, 5, 9)[row % 6] for row in range(rows)]


@pytest.mark.parametrize("scales_inputs", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.float16, 6e-3)])
def test_adapters_of_experts(dtype: torch.dtype, near: float, scales_inputs: bool) -> None:
    routing = Routing(scoring="sigmoid", scales_inputs=scales_inputs)
    slots = slots_of_many(40)
    torch.manual_seed(3)
    x, logits = torch.randn(40, HIDDEN).to(dtype), torch.randn(40, COUNT)
    mixed = MixedExperts(triton_ops(CPU, dtype), dtype, routing)
    got, plain = mixed(x, logits, slots), mixed(x, logits, [-1] * 40)
    expected = MixedExperts(REFERENCE, dtype, routing)(x, logits, slots)
    torch.testing.assert_close(got, expected, atol=near, rtol=near)
    changed = (got != plain).any(1)
    assert all(changed[row] for row, slot in enumerate(slots) if slot == 5)
    assert not any(changed[row] for row, slot in enumerate(slots) if slot in {-1, 9})


def test_adapters_of_ranks_with_some_experts_whole_add_up():
    slots = [(-1, 0, 5, 63, 5, 9)[row % 6] for row in range(20)]
    torch.manual_seed(3)
    x, logits = torch.randn(20, HIDDEN), torch.randn(20, COUNT)
    ops = triton_ops(CPU, torch.float32)
    whole = MixedExperts(ops, torch.float32, Routing())(x, logits, slots)
    halves = [range(2), range(2, COUNT)]
    found = [MixedExperts(ops, torch.float32, Routing(), held)(x, logits, slots) for held in halves]
    torch.testing.assert_close(found[0] + found[1], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quant", [None, "int8", "w8a8"])
def test_bits_of_a_row_of_experts_do_not_depend_on_the_others(quant: str | None) -> None:
    """Runs of more rows than a tile has; base weights and inputs in eight bits too."""
    ops = triton_ops(CPU, torch.float16, QUANTS.get(quant or ""), deterministic=True)
    mixed = MixedExperts(ops, torch.float16, Routing())
    slots = slots_of_many(70)
    torch.manual_seed(3)
    x, logits = torch.randn(70, HIDDEN).half(), torch.randn(70, COUNT)
    logits[:, 2] += 3  # one expert that nearly all choose
    together = mixed(x, logits, slots)
    for row in range(0, 70, 11):
        alone = mixed(x[row : row + 1], logits[row : row + 1], slots[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_adapters_of_experts_come_and_go() -> None:
    """What an expert has nothing of is left, and so is all of a slot that was emptied."""
    ops = triton_ops(CPU, torch.float32)
    assert ops.lora is not None
    mixed = MixedExperts(ops, torch.float32, Routing())
    x, logits = torch.randn(4, HIDDEN), torch.zeros(4, COUNT)
    logits[:, [1, 3, 5]] = 1  # the adapter of slot 63 changes expert 4 alone
    plain = mixed(x, logits, [-1] * 4)
    assert torch.equal(mixed(x, logits, [63] * 4), plain)
    assert not torch.equal(mixed(x, logits, [5] * 4), plain)
    addresses = [site.on_device for site in mixed.sites]
    for site in mixed.sites:
        ops.lora.unload(site, 5)
    assert torch.equal(mixed(x, logits, [5] * 4), plain)
    pairs = zip(mixed.sites, addresses, strict=True)
    assert all(site.on_device is address for site, address in pairs), "graphs hold them"


@pytest.mark.parametrize("block", [16, 64, fused_moe.SORT_BLOCK])
def test_tiles_of_experts_hold_each_row_once(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(fused_moe, "SORT_BLOCK", block)
    torch.manual_seed(0)
    slots = slots_of_many(50)
    chosen_TK = torch.stack([torch.randperm(COUNT)[:3] for _ in slots])
    chosen_TK[:20, 0] = 2
    rows = tiles_of(slots, padding=2)
    sorted_S, order_S, tiles = sort_experts(chosen_TK, COUNT, rows)
    assert torch.equal(sorted_S, chosen_TK.flatten()[order_S])
    assert torch.equal(sorted_S, sorted_S.sort().values)
    seen: list[int] = []
    for slot, places in tiles.runs():
        assert 0 < len(places) <= TILE_ROWS
        for place in places.tolist():
            assert slot == slots[int(order_S[place]) // 3] * COUNT + int(sorted_S[place])
            seen.append(place)
    wanted = [place for place, row in enumerate((order_S // 3).tolist()) if slots[row] >= 0]
    assert sorted(seen) == wanted


def test_tiles_of_experts_have_room_for_any_choice() -> None:
    for rows, adapters, per_row in ((1, 1, 2), (16, 1, 4), (40, 3, 2), (130, 64, 3)):
        slots = [min(row, adapters - 1) for row in range(rows)]
        for seed in range(3):
            torch.manual_seed(seed)
            chosen_TK = torch.stack([torch.randperm(7)[:per_row] for _ in slots])
            numbers = LoraTiles.numbers((slot, range(row, row + 1)) for row, slot in enumerate(slots))
            on_device = tiles_of(slots)
            for known in (on_device, LoraTiles(on_device.tiles, numbers)):
                _, _, tiles = sort_experts(chosen_TK, 7, known)
                assert sum(len(places) for _, places in tiles.runs()) == rows * per_row
