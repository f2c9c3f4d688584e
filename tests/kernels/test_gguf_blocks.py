"""Linears on GGUF's blocks: the weights are those of ggml's own library to the bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor

from llmbox.engine.gguf.blocks import unpack_rows
from llmbox.engine.gguf.reader import BLOCKS
from llmbox.kernels.cpu.weight_packing import INT8_SCALED, WIDE_BFLOAT16
from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import GGUF_QUANTS, QUANTS
from llmbox.kernels.weight_packing import BlockWeight, QuantizedWeight, scale_dtype
from support.gguf_models import random_blocks
from support.kernel_backends import backends
from support.numbers import assert_near

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=[name for name in backends() if name.startswith("cpu ")])
def ops(request: pytest.FixtureRequest) -> Ops:
    backend = load_backend(request.param)
    backend.use_threads([0, 1, 0])
    return backend.ops(QUANTS["gguf"])


def blocks_of(kind: str, outputs: int, inputs: int) -> tuple[BlockWeight | QuantizedWeight, Tensor]:
    """Return random blocks, and their weights by ggml's library."""
    raw = random_blocks(kind, outputs * inputs // BLOCKS[kind][0])
    weights = dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32).reshape(outputs, inputs)
    weight = unpack_rows(kind, torch.from_numpy(raw), outputs)
    if isinstance(weight, QuantizedWeight):
        weight = QuantizedWeight(
            weight.quant, weight.codes_OI, weight.scales_OG.to(scale_dtype(weight.quant))
        )
    return weight, torch.from_numpy(weights)


def pack(ops: Ops, *weights: BlockWeight | QuantizedWeight | Tensor, dtype: torch.dtype = torch.float32):
    assert ops.packing is not None
    return ops.packing.pack_blocks(weights, dtype)


LARGER = {"IQ1": 2.3, "IQ2": 1.73, "IQ3": 1.41, "TQ1": 1.49, "TQ2": 1.22}
"""Memory of types whose blocks are patterns, or hold several numbers in one, beside the file's."""


@pytest.mark.parametrize("kind", GGUF_QUANTS)
def test_panels_hold_the_weights_of_the_file_to_the_bit(ops: Ops, kind: str) -> None:
    weight, wanted = blocks_of(kind, 70, 768)
    assert torch.equal(weight.floats(), wanted)
    table = pack(ops, weight)
    assert torch.equal(ops.embedding(table, torch.arange(70)), wanted)
    assert ops.packing is not None
    in_memory = len(ops.packing.panels(table)) / (128 * 768)
    assert in_memory == pytest.approx(GGUF_QUANTS[kind].bytes_per_weight)
    assert in_memory <= LARGER.get(kind[:3], 1.06) * BLOCKS[kind][1] / BLOCKS[kind][0]


@pytest.mark.parametrize("kind", GGUF_QUANTS)
def test_a_product_is_that_of_the_file_s_weights(ops: Ops, kind: str) -> None:
    """Rows are rounded to 8 bits in groups of 32; everything else is exact to float32."""
    weight, wanted = blocks_of(kind, 70, 768)
    packed = pack(ops, weight)
    for rows in (1, 2, 7):
        x = torch.randn(rows, 768)
        groups = x.view(rows, -1, 32)
        scale = groups.abs().amax(-1, keepdim=True) / 127
        rounded = ((groups / scale).round() * scale).view(rows, 768)
        exact = rounded.double() @ wanted.double().T
        torch.testing.assert_close(
            ops.linear(packed, x).double(), exact, rtol=1e-4, atol=2e-5 * float(exact.abs().max())
        )


@pytest.mark.parametrize("kind", GGUF_QUANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_number_of_rows(ops: Ops, kind: str, dtype: torch.dtype) -> None:
    weight, _ = blocks_of(kind, 130, 512)
    packed = pack(ops, weight, dtype=dtype)
    x = torch.randn(200, 512).to(dtype)
    together = ops.linear(packed, x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 33):
        assert torch.equal(ops.linear(packed, x[:rows].clone()), together[:rows]), rows


def test_a_broken_row_is_nan_and_alone(ops: Ops) -> None:
    for kind in ("Q4_K", "Q6_K"):
        packed, x = pack(ops, blocks_of(kind, 70, 256)[0]), torch.randn(3, 256)
        clean = ops.linear(packed, x)
        x[1, 200] = torch.inf
        got = ops.linear(packed, x)
        assert got[1].isnan().all()
        assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_outputs_of_several_types_are_one_linear(ops: Ops) -> None:
    """As queries, keys and values of Q4_K_M are; kept on disk and attached too."""
    assert ops.packing is not None
    parts = [blocks_of("Q4_K", 40, 512)[0], torch.randn(7, 512), blocks_of("Q6_K", 70, 512)[0]]
    bias, x = torch.randn(117), torch.randn(9, 512)
    stack = ops.packing.pack_blocks(parts, torch.float32, bias)
    alone = [ops.linear(pack(ops, part), x).clone() for part in parts]
    together = ops.linear(stack, x).clone()
    torch.testing.assert_close(together, torch.cat(alone, 1) + bias)
    name, panels = ops.packing.format_name(stack), ops.packing.panels(stack)
    room = torch.empty(len(panels) + 64, dtype=torch.uint8)
    kept = room[-room.data_ptr() % 64 :][: len(panels)]
    kept.copy_(torch.frombuffer(bytearray(panels), dtype=torch.uint8))
    again = ops.packing.attach(name, (117, 512), torch.float32, kept, bias)
    assert again is not None
    assert torch.equal(ops.linear(again, x), together)
    assert ops.packing.attach(name, (116, 512), torch.float32, kept, bias) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(192, 128), (32, 70)])
def test_blocks_of_heads_are_multiplied_as_their_floats(
    ops: Ops, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    """Rows are not rounded: what comes out is near the product of floats, alone and among others."""
    assert ops.packing is not None
    pairs = [blocks_of("Q8_0", outputs, inputs) for _ in range(3)]
    heads = [ops.packing.pack_wide(weight, dtype) for weight, _ in pairs]
    floats_HOI = torch.stack([floats for _, floats in pairs])
    assert {head.form for head in heads} == {INT8_SCALED}
    assert ops.packing.pack_wide(blocks_of("Q4_0", outputs, inputs)[0], dtype) is None
    size = floats_HOI.abs().amax() * inputs**0.5
    x_THI = (torch.randn(260, 4, inputs) / size).to(dtype)[:, 1:]
    together = ops.linear_by_head(heads, x_THI).clone()
    exact = torch.einsum("thi,hoi->tho", x_THI.double(), floats_HOI.double())
    assert_near(together, exact)
    for rows in (*range(1, 9), 33, 200):
        assert torch.equal(ops.linear_by_head(heads, x_THI[-rows:].clone()), together[-rows:]), rows
    name = ops.packing.format_name(heads[0])
    attached = ops.packing.attach(name, (outputs, inputs), dtype, aligned(ops.packing.panels(heads[0])))
    assert attached is not None
    assert attached.form == INT8_SCALED
    assert torch.equal(ops.linear_by_head([attached], x_THI[:, :1]), together[:, :1])


def aligned(panels: memoryview) -> Tensor:
    """Copy bytes to where packed weights may lie."""
    room = torch.empty(len(panels) + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    room[begin : begin + len(panels)] = torch.frombuffer(bytearray(panels), dtype=torch.uint8)
    return room[begin : begin + len(panels)]


@pytest.mark.parametrize(("inputs", "outputs"), [(192, 128), (31, 70)])
def test_bf16_beside_integers_is_multiplied_as_float32(ops: Ops, inputs: int, outputs: int) -> None:
    """The bits are those of weights and rows in float32, where products of two bf16 have others."""
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(3)]
    bias = torch.randn(outputs).bfloat16()
    heads = [ops.pack_router(weight, bias) for weight in weights]
    assert {head.form for head in heads} == {WIDE_BFLOAT16}
    x_THI = torch.randn(40, 3, inputs).bfloat16()
    together = ops.linear_by_head(heads, x_THI).clone()
    for h, (head, weight) in enumerate(zip(heads, weights, strict=True)):
        wanted = ops.logits(ops.pack_router(weight.float(), bias.float()), x_THI[:, h].float())
        got = ops.logits(head, x_THI[:, h])
        assert torch.equal(got.bfloat16(), together[:, h])
        for rows in (1, 2, 7, 40):
            assert torch.equal(ops.logits(head, x_THI[:rows, h]), got[:rows]), rows
        if "portable" in ops.name:  # without fused operations plain float32 is rounded twice
            torch.testing.assert_close(got, wanted)
        else:
            assert torch.equal(got, wanted)
