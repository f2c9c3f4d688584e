"""Quantized linears: what the format says, how close it is, and one row, one result."""

import pytest
import torch
from torch import Tensor

from llmbox.kernels.dispatch import QuantUnavailable, load_backend, select_ops
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.weight_packing import QuantizedWeight, round_with_steps, to_nibbles, to_numbers
from support.kernel_backends import backends

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[name for name in backends() if name.startswith("cpu ")])
def level(request: pytest.FixtureRequest) -> str:
    return request.param


INTEGERS = [
    name for name, quant in QUANTS.items() if quant.kind == "integer" and not quant.in_checkpoints_only
]


@pytest.fixture(params=INTEGERS)
def quant(request: pytest.FixtureRequest) -> Quant:
    return QUANTS[request.param]


def quantized(level: str, quant: Quant) -> Ops:
    backend = load_backend(level)
    backend.use_threads([0, 1, 0])
    return backend.ops(quant)


def weights_of(ops: Ops, weight_OI: Tensor) -> Tensor:
    """As they are after rounding: read back as an embedding table."""
    table = ops.pack_embedding(weight_OI, True)
    return ops.embedding(table, torch.arange(len(weight_OI))).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 256, 96), (7, 300, 130), (33, 128, 64), (13, 20, 3)]
)
def test_is_close_to_the_exact_product(
    level: str, quant: Quant, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    ops = quantized(level, quant)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    got = ops.linear(ops.pack_linear(weight, bias), x).double()
    exact = x.double() @ weight.double().T
    error = (got - exact - bias.double()).norm() / exact.norm()
    assert error < {8: 0.02, 4: 0.12}[quant.bits]


def test_eight_bits_are_rounded_to_the_nearest(level: str) -> None:
    weight = torch.randn(70, 200) / 20
    got = weights_of(quantized(level, QUANTS["int8-g32"]), weight)
    padded = torch.nn.functional.pad(weight, (0, 24)).view(70, 7, 32)
    scale = (padded.abs().amax(-1, keepdim=True) / 127).half().float()
    expected = ((padded / scale).round().clamp(-128, 127) * scale).view(70, 224)[:, :200]
    assert torch.allclose(got, expected, atol=1e-6)


def test_a_product_is_that_of_the_rounded_numbers(level: str, quant: Quant) -> None:
    """Everything after the rounding of weights and rows is exact to float32."""
    ops = quantized(level, quant)
    weight, x = torch.randn(96, 256) / 16, torch.randn(5, 256)
    rounded = weights_of(quantized(level, quant), weight) if quant.bits == 8 else None
    if rounded is None:  # a table never has four bits: read the weights back through unit rows
        rounded = ops.linear(ops.pack_linear(weight, None), torch.eye(256)).T
    groups = x.view(5, -1, quant.group)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded_x = ((groups / scale).round() * scale).view(5, 256)
    got = ops.linear(ops.pack_linear(weight, None), x)
    torch.testing.assert_close(got.double(), rounded_x.double() @ rounded.double().T, atol=2e-4, rtol=1e-3)


def test_four_bits_take_a_scale_of_almost_the_smallest_error(level: str) -> None:
    """An error counts |x| + the root mean square of its group. Of 400 scales a group, each with its codes."""
    quant, weight = QUANTS["int4-g128"], torch.randn(64, 512) / 20
    packing = quantized(level, quant).packing
    assert packing is not None
    groups = weight.view(-1, quant.group)
    counts = groups.abs() + groups.square().mean(-1, keepdim=True).sqrt()
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))

    def error(rounded: Tensor) -> Tensor:
        return (counts * (rounded.view_as(groups) - groups).square()).sum(-1)

    def rounded_with(scale: Tensor) -> Tensor:
        return (groups / scale).round().clamp(-8, 7) * scale

    tried = [error(rounded_with(extreme / -codes)) for codes in torch.linspace(5, 13, 400)]
    smallest = torch.stack(tried).amin(0).sum()
    nearest = error(rounded_with(extreme.abs() / 7)).sum()
    got = error(packing.round(quant, weight).floats()).sum()
    assert got < 1.01 * smallest
    assert got < 0.75 * nearest


@pytest.mark.parametrize("inputs", [512, 200, 20])
def test_steps_are_those_of_plain_torch(level: str, inputs: int) -> None:
    """Outliers of either sign too, groups of zeros, and what is left of a group."""
    quant, weight = QUANTS["int4"], torch.randn(64, inputs) / 20
    weight[3, 5], weight[4, 6], weight[5], weight[6, :16] = 2.0, -2.0, 0.0, weight[6, :16].abs()
    packing = quantized(level, quant).packing
    assert packing is not None
    got = packing.round(quant, weight)
    padded = torch.nn.functional.pad(weight, (0, -inputs % 128)).view(64, -1, 128)
    numbers, scales, steps = round_with_steps(padded, quant)
    expected = QuantizedWeight(quant, numbers.flatten(1)[:, :inputs], scales, steps_OS=steps.flatten(1))
    assert got.steps_OS is not None
    assert got.steps_OS.shape == (64, quant.steps(inputs))
    # Sums in another order may tip a choice between two that are as good.
    errors = [float((each.floats() - weight).square().sum()) for each in (got, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    assert (got.codes_OI == expected.codes_OI).float().mean() > 0.97
    assert torch.equal(weights_of_halves(got), got.codes_OI)


def weights_of_halves(rounded: QuantizedWeight) -> Tensor:
    """What is left when only n, steps and scales are kept."""
    assert rounded.steps_OS is not None
    halves = to_nibbles(rounded.codes_OI, rounded.steps_OS, rounded.quant)
    return to_numbers(halves, rounded.steps_OS, rounded.quant)


def test_packed_from_rounded_weights_is_packed_at_once(level: str, quant: Quant) -> None:
    ops, weight, x = quantized(level, quant), torch.randn(70, 300), torch.randn(9, 300)
    assert ops.packing is not None
    rounded = ops.packing.pack_quantized(ops.packing.round(quant, weight), torch.float32)
    assert torch.equal(ops.linear(rounded, x), ops.linear(ops.pack_linear(weight, None), x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(300, 130), (1024, 64)])
def test_a_row_does_not_depend_on_the_number_of_rows(
    level: str, quant: Quant, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    ops = quantized(level, quant)
    packed = ops.pack_linear((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), None)
    x = torch.randn(230, inputs).to(dtype)
    together = ops.linear(packed, x)
    for rows in [*range(1, 14), 33, 65, 200]:
        assert torch.equal(ops.linear(packed, x[:rows].clone()), together[:rows]), rows


AMX, VECTORS = "cpu amx", "cpu avx512-bf16"


@pytest.mark.skipif(AMX not in backends(), reason="this CPU has no AMX")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(20, 3), (300, 130), (1024, 64)])
def test_tiles_give_the_bits_of_vectors(quant: Quant, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """So each number of rows may take whichever is faster."""
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x = torch.randn(230, inputs).to(dtype)
    tiles, vectors = quantized(AMX, quant), quantized(VECTORS, quant)
    of_tiles, of_vectors = tiles.pack_linear(weight, None), vectors.pack_linear(weight, None)
    expected = vectors.linear(of_vectors, x)
    for rows in [*range(1, 71), 200, 230]:
        assert torch.equal(tiles.linear(of_tiles, x[:rows].clone()), expected[:rows]), rows


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_broken_row_is_nan_and_alone(level: str, quant: Quant, poison: float) -> None:
    ops = quantized(level, quant)
    packed = ops.pack_linear(torch.randn(70, 256), None)
    x = torch.randn(3, 256)
    clean = ops.linear(packed, x)
    x[1, 200] = poison
    got = ops.linear(packed, x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_zero_weights_and_rows(level: str, quant: Quant) -> None:
    ops = quantized(level, quant)
    zero = ops.pack_linear(torch.zeros(3, 40), None)
    assert torch.equal(ops.linear(zero, torch.randn(2, 40)), torch.zeros(2, 3))
    packed = ops.pack_linear(torch.randn(3, 40), None)
    assert torch.equal(ops.linear(packed, torch.zeros(2, 40)), torch.zeros(2, 3))


def test_what_cannot_run_quantized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    int8 = QUANTS["int8"]
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    with pytest.raises(QuantUnavailable, match="with bfloat16 or float32"):
        select_ops(CPU, torch.float16, quant=int8)
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    with pytest.raises(QuantUnavailable, match="reference"):
        select_ops(CPU, torch.float32, quant=int8)
