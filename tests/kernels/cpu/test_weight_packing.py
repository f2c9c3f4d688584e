"""Packed weights in parts: rounded apart, taken up again from bytes, and the same results either way."""

import re
from pathlib import Path

import pytest
import torch

from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.weight_packing import Kind, Packing
from support.kernel_backends import backends
from support.published_formats import stored_weight

INTEGERS = [
    name for name, quant in QUANTS.items() if quant.kind == "integer" and not quant.in_checkpoints_only
]
STORED = [
    name
    for name, quant in QUANTS.items()
    if quant.kind == "integer" and quant.in_checkpoints_only and not quant.rounds_head
]
SHAPES = [(1, 1), (65, 33), (7, 300), (130, 256)]


@pytest.fixture(params=[name for name in backends() if name.startswith("cpu ")])
def level(request: pytest.FixtureRequest) -> str:
    return request.param


def offered(level: str, quant: str) -> tuple[Ops, Packing]:
    backend = load_backend(level)
    backend.use_threads([0, 1])
    ops = backend.ops(QUANTS.get(quant))
    assert ops.packing is not None
    return ops, ops.packing


@pytest.mark.parametrize("kind", ["linear", "head", "table", "tied"])
@pytest.mark.parametrize("quant", ["none", *INTEGERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_taken_up_again_give_the_same_bits(
    level: str, quant: str, kind: Kind, dtype: torch.dtype
) -> None:
    ops, packing = offered(level, quant)
    for outputs, inputs in SHAPES:
        weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
        packed = packing.pack(kind, weight, bias)
        panels = torch.empty(0, dtype=torch.uint8)
        aligned = torch.empty(packing.panels(packed).nbytes + 64, dtype=torch.uint8)
        start = -aligned.data_ptr() % 64
        panels = aligned[start : start + packing.panels(packed).nbytes]
        panels.copy_(torch.frombuffer(bytearray(packing.panels(packed)), dtype=torch.uint8))
        again = packing.attach(packing.format_name(packed), (outputs, inputs), dtype, panels, bias)
        x = torch.randn(5, inputs).to(dtype)
        assert torch.equal(ops.linear(again, x), ops.linear(packed, x))


def test_panels_of_another_size_or_place_are_refused(level: str) -> None:
    _, packing = offered(level, "int8")
    panels = torch.zeros(4096, dtype=torch.uint8)
    start = -panels.data_ptr() % 64
    assert packing.attach("", (64, 64), torch.float32, panels[start : start + 1024]) is None
    assert packing.attach("", (64, 64), torch.float32, panels[start + 1 :]) is None


@pytest.mark.parametrize("quant", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_apart_and_packing_the_integers_is_packing(
    level: str, quant: str, dtype: torch.dtype
) -> None:
    ops, packing = offered(level, quant)
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs).to(dtype)
        rounded = packing.round(QUANTS[quant], weight)
        from_integers = packing.pack_quantized(rounded, dtype)
        assert bytes(packing.panels(from_integers)) == bytes(packing.panels(packing.pack("linear", weight)))
        table = ops.embedding(packing.pack_quantized(rounded, torch.float32), torch.arange(outputs))
        assert torch.equal(table, rounded.floats())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_numbers_of_checkpoints_are_multiplied_as_they_are(level: str, name: str, ordered: bool) -> None:
    """A row with a single one in it gives a column of the weights, alone and beside others."""
    ops, packing = offered(level, name)
    for outputs, inputs in SHAPES:
        weight = stored_weight(QUANTS[name], outputs, inputs, ordered=ordered)
        packed = packing.pack_quantized(weight, torch.float32)
        rows = torch.eye(inputs)
        got = ops.linear(packed, rows)
        assert torch.allclose(got, weight.floats().T, rtol=1e-6, atol=0)
        for count in (1, 3, 6):
            assert torch.equal(ops.linear(packed, rows[-count:]), got[-count:])
        if not ordered:
            assert torch.equal(ops.embedding(packed, torch.arange(outputs)), weight.floats())
        panels = torch.empty(packing.panels(packed).nbytes + 64, dtype=torch.uint8)
        panels = panels[-panels.data_ptr() % 64 :][: packing.panels(packed).nbytes]
        panels.copy_(torch.frombuffer(bytearray(packing.panels(packed)), dtype=torch.uint8))
        again = packing.attach(packing.format_name(packed), (outputs, inputs), torch.float32, panels)
        assert torch.equal(ops.linear(again, rows), got)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", [name for name in STORED if QUANTS[name].bits == 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_checkpoints_are_multiplied_alike_for_all_rows(
    level: str, name: str, dtype: torch.dtype, ordered: bool
) -> None:
    """Zeros are taken off sums, off weights in registers or off weights in memory, by the number of rows."""
    ops, packing = offered(level, name)
    weight = stored_weight(QUANTS[name], 70, 320, ordered=ordered)
    packed = packing.pack_quantized(weight, dtype)
    x = (torch.randn(65, 320) + 0.5).to(dtype)  # sums far from 0, which zeros are multiplied with
    x[7] = 3.0  # all bytes of a group at 127
    together = ops.linear(packed, x)
    for rows in (*range(1, 14), 16, 17, 33):
        assert torch.equal(ops.linear(packed, x[:rows].clone()), together[:rows]), rows
    exact = x.double() @ weight.floats().double().T
    assert (together.double() - exact).norm() < 0.02 * exact.norm()
    size = weight.floats().abs() @ x[7].abs().float()
    assert ((together[7].double() - exact[7]).abs() <= 0.004 * size).all()  # the row is exact in bytes


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages"
)
def test_weights_smaller_than_a_huge_page_ask_for_them(level: str) -> None:
    """All of them: one that ends inside a huge page shares it with the next."""
    _, packing = offered(level, "int8")
    packed = [packing.pack("linear", torch.randn(rows, 512)) for rows in (64, 700, 1500)]
    for each in packed:
        panels = packing.panels(each)
        first = torch.frombuffer(panels, dtype=torch.uint8).data_ptr()
        assert "hg" in mapping_flags(first)
        assert "hg" in mapping_flags(first + panels.nbytes - 1)


def mapping_flags(address: int) -> list[str]:
    """Return the flags of the mapping that has this address (`VmFlags` of /proc/self/smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
