"""Operations of adapters beside the formula, and a row's bits whatever is beside it."""

import ctypes
import threading

import pytest
import torch
from torch import Tensor

from llmbox.kernels.cpu import lora
from llmbox.kernels.cpu.lora import LoraMemory
from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.lora import LoraPiece, LoraRows, LoraSite, LoraWeights
from llmbox.kernels.op_types import Routing
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.reference import REFERENCE
from support.kernel_backends import backends
from support.mixed_experts import COUNT, HIDDEN, MixedExperts
from support.numbers import DTYPES, assert_near

INPUTS, OUTPUTS = 123, 150


def weights(rank: int, dtype: torch.dtype, seed: int) -> LoraWeights:
    """Two parts with other ranks; the outputs between them have none."""
    torch.manual_seed(seed)
    pieces = (
        LoraPiece(0, 70, 0, torch.randn(70, rank).to(dtype)),
        LoraPiece(80, OUTPUTS, rank, torch.randn(OUTPUTS - 80, 3).to(dtype)),
    )
    return LoraWeights(torch.randn(rank + 3, INPUTS).to(dtype) / 8, torch.rand(rank + 3), pieces)


def exact(x_TI: Tensor, y_TO: Tensor, by_row: list[LoraWeights | None]) -> Tensor:
    y = y_TO.double().clone()
    for row, adapter in enumerate(by_row):
        if adapter is None:
            continue
        low = (adapter.a_RI.double() @ x_TI[row].double()) * adapter.scales_R.double()
        for piece in adapter.pieces:
            part = low[piece.first : piece.first + piece.b_Or.shape[1]]
            y[row, piece.start : piece.stop] += piece.b_Or.double() @ part
    return y


def rows_of(slots: list[int]) -> LoraRows:
    rows = LoraRows.of((slot, range(row, row + 1)) for row, slot in enumerate(slots))
    assert rows is not None
    return rows


def loaded(ops: Ops, adapters: dict[int, LoraWeights]) -> LoraSite:
    assert ops.lora is not None
    site = LoraSite()
    for slot, adapter in adapters.items():
        ops.lora.load(site, slot, adapter)
    return site


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_adapters_of_a_batch(ops: Ops, dtype: torch.dtype, rows: int) -> None:
    adapters = {slot: weights(rank, dtype, slot) for slot, rank in ((0, 1), (5, 8), (63, 64))}
    site = loaded(ops, adapters)
    slots = [(-1, 0, 5, 63, 5, 9)[row % 6] if rows > 1 else 5 for row in range(rows)]
    x, y = torch.randn(rows, INPUTS + 5).to(dtype)[:, :INPUTS], torch.randn(rows, OUTPUTS).to(dtype)
    expected = exact(x, y, [adapters.get(slot) for slot in slots])
    assert ops.lora is not None
    ops.lora.add(site, x, y, rows_of(slots))
    assert_near(y, expected)


@pytest.mark.parametrize("level", [name for name in backends() if name.startswith("cpu ")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_beside_quantized_weights_have_8_bits(level: str, dtype: torch.dtype) -> None:
    ops = load_backend(level).ops(QUANTS["int8"])
    assert ops.lora is not None
    assert ops.lora.is_int8
    adapters = {slot: weights(rank, dtype, slot) for slot, rank in ((0, 1), (5, 8), (63, 64))}
    adapters[63].a_RI[3] = 0
    site = loaded(ops, adapters)
    slots = [(-1, 0, 5, 63, 5, 9)[row % 6] for row in range(37)]
    x, y = torch.randn(37, INPUTS).to(dtype), torch.randn(37, OUTPUTS)
    expected = exact(x, y, [adapters.get(slot) for slot in slots])
    together = y.clone()
    ops.lora.add(site, x, together, rows_of(slots))
    for row, slot in enumerate(slots):
        alone = y[row : row + 1].clone()
        if slot >= 0:
            ops.lora.add(site, x[row : row + 1], alone, rows_of([slot]))
        assert torch.equal(alone[0], together[row])
        added, wanted = together[row].double() - y[row], expected[row] - y[row].double()
        assert (added - wanted).norm() <= 0.025 * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_in_float32(ops: Ops, dtype: torch.dtype) -> None:
    adapter = weights(8, dtype, 1)
    site = loaded(ops, {2: adapter})
    x, y = torch.randn(3, INPUTS).to(dtype), torch.randn(3, OUTPUTS)
    expected = exact(x, y, [adapter, None, adapter])
    assert ops.lora is not None
    ops.lora.add(site, x, y, rows_of([2, -1, 2]))
    torch.testing.assert_close(y.double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_the_others(ops: Ops, dtype: torch.dtype) -> None:
    if not ops.row_invariant:
        pytest.skip("these kernels promise it of no operation")
    assert ops.lora is not None
    site = loaded(ops, {slot: weights(16 + slot, dtype, slot) for slot in range(4)})
    slots = [(0, 1, 2, 3, -1)[row % 5] for row in range(37)]
    x, y = torch.randn(37, INPUTS).to(dtype), torch.randn(37, OUTPUTS).to(dtype)
    together = y.clone()
    ops.lora.add(site, x, together, rows_of(slots))
    for row, slot in enumerate(slots):
        alone = y[row : row + 1].clone()
        if slot >= 0:
            ops.lora.add(site, x[row : row + 1], alone, rows_of([slot]))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slot_is_emptied(ops: Ops, dtype: torch.dtype) -> None:
    assert ops.lora is not None
    site = loaded(ops, {1: weights(4, dtype, 1)})
    ops.lora.unload(site, 1)
    x, y = torch.randn(2, INPUTS).to(dtype), torch.randn(2, OUTPUTS).to(dtype)
    kept = y.clone()
    ops.lora.add(site, x, y, rows_of([1, 1]))
    assert torch.equal(y, kept)


def test_memory_for_an_adapter_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[str] = []

    class Memory(LoraMemory):
        def __init__(self, library: ctypes.CDLL, nbytes: int) -> None:
            makers.append(threading.current_thread().name)
            super().__init__(library, nbytes)

    monkeypatch.setattr(lora, "LoraMemory", Memory)
    native = [name for name in backends() if name.startswith("cpu ")]
    ops = load_backend(native[-1]).ops().lora
    assert ops is not None
    here, size = threading.current_thread().name, 1 << 20
    ops.prepare(size)
    ops.reserve(0, size)
    assert makers == ["llmbox-lora"]
    ops.reserve(1, size)
    assert makers[1:] == [here]
    ops.release(1)
    ops.prepare(size)  # what was released is as good
    ops.reserve(1, size)
    assert len(makers) == 2
    ops.prepare(size)
    ops.prepare(size)
    ops.reserve(2, 3 * size)
    assert makers[2:] == ["llmbox-lora", here]  # too small


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_of_an_adapter(ops: Ops, dtype: torch.dtype) -> None:
    assert ops.lora is not None
    site, table = LoraSite(), torch.randn(50, 72).to(dtype)
    ops.lora.load_table(site, 3, table)
    ids, x = torch.tensor([4, 9, 49]), torch.randn(3, 72).to(dtype)
    kept = x.clone()
    ops.lora.embed(site, ids, x, 2.0, rows_of([3, -1, 3]))
    assert torch.equal(x[1], kept[1])
    assert_near(x[[0, 2]], table[[4, 49]].double() * 2)


@pytest.mark.parametrize("scales_inputs", [False, True])
def test_adapters_of_experts(ops: Ops, scales_inputs: bool) -> None:
    routing = Routing(scoring="sigmoid", scales_inputs=scales_inputs)
    slots = [(-1, 0, 5, 63, 5, 9)[row % 6] for row in range(40)]
    torch.manual_seed(3)
    x, logits = torch.randn(40, HIDDEN), torch.randn(40, COUNT)
    got = MixedExperts(ops, torch.float32, routing)(x, logits, slots)
    expected = MixedExperts(REFERENCE, torch.float32, routing)(x, logits, slots)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    plain = MixedExperts(ops, torch.float32, routing)(x, logits, [-1] * 40)
    changed = (got != plain).any(1)
    assert all(changed[row] for row, slot in enumerate(slots) if slot == 5)
    assert not any(changed[row] for row, slot in enumerate(slots) if slot in {-1, 9})


def test_adapters_of_ranks_with_some_experts_whole_add_up(ops: Ops) -> None:
    slots = [(-1, 0, 5, 63, 5, 9)[row % 6] for row in range(40)]
    torch.manual_seed(3)
    x, logits = torch.randn(40, HIDDEN), torch.randn(40, COUNT)
    whole = MixedExperts(ops, torch.float32, Routing())(x, logits, slots)
    halves = [range(2), range(2, COUNT)]
    found = [MixedExperts(ops, torch.float32, Routing(), held)(x, logits, slots) for held in halves]
    torch.testing.assert_close(found[0] + found[1], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_of_experts_do_not_depend_on_the_others(ops: Ops, dtype: torch.dtype) -> None:
    if not ops.row_invariant:
        pytest.skip("these kernels promise it of no operation")
    slots = [(-1, 0, 5, 63, 5, 9)[row % 6] for row in range(70)]
    torch.manual_seed(3)
    x, logits = torch.randn(70, HIDDEN).to(dtype), torch.randn(70, COUNT)
    logits[:, 2] += 3  # one expert that nearly all choose
    experts = MixedExperts(ops, dtype, Routing())
    together = experts(x, logits, slots)
    for row, slot in enumerate(slots):
        alone = experts(x[row : row + 1], logits[row : row + 1], [slot])
        assert torch.equal(alone[0], together[row])


def test_adapters_of_experts_are_unloaded(ops: Ops) -> None:
    assert ops.lora is not None
    experts = MixedExperts(ops, torch.float32, Routing())
    x, logits = torch.randn(4, HIDDEN), torch.randn(4, COUNT)
    for site in experts.sites:
        ops.lora.unload(site, 5)
    assert torch.equal(experts(x, logits, [5] * 4), experts(x, logits, [-1] * 4))
