"""Experts that the CPU computes beside a GPU: the C++ kernels' bits, whoever else is in the step."""

from dataclasses import replace

import pytest
import torch

from llmbox.engine.device.device import CudaDevice, HostDevice
from llmbox.engine.device.host_experts import with_host_experts
from llmbox.engine.errors import DeviceError
from llmbox.kernels.cpu.build import NativeUnavailable
from llmbox.kernels.dispatch import select_host
from llmbox.kernels.op_types import Mixture, Routing
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.reference import REFERENCE
from support.fake_cuda import fake_cuda

pytestmark = pytest.mark.process  # a compiler is asked for its version
HIDDEN, INNER, EXPERTS, CHOSEN = 64, 32, 8, 3
CPU = torch.device("cpu")


def mixture(ops, dtype, **routing):
    draw = torch.Generator().manual_seed(3)

    def linear(outputs, inputs):
        weight = torch.randn(outputs, inputs, generator=draw).to(dtype) / inputs**0.5
        return ops.pack_linear(weight, None)

    return Mixture(
        [linear(2 * INNER, HIDDEN) for _ in range(EXPERTS)],
        [linear(HIDDEN, INNER) for _ in range(EXPERTS)],
        EXPERTS,
        CHOSEN,
        True,
        Routing(**routing),
    )


def inputs(rows, dtype):
    draw = torch.Generator().manual_seed(rows)

    def numbers(width):
        return torch.randn(rows, width, generator=draw)

    return numbers(HIDDEN).to(dtype), numbers(EXPERTS), numbers(HIDDEN).to(dtype), numbers(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant", ["none", "int8"])
@pytest.mark.parametrize("beside", ["nothing", "shared", "gated"])
def test_the_bits_are_those_of_the_kernels_on_a_cpu(dtype, quant, beside):
    host = select_host(1, QUANTS.get(quant))
    layer = mixture(host, dtype)
    x_TE, logits_TX, *more = inputs(5, dtype)
    more = {"nothing": [], "shared": more[:1], "gated": more}[beside]
    expected = host.experts(layer, x_TE, logits_TX, *more)
    with fake_cuda():
        ops = with_host_experts(REFERENCE, CudaDevice(torch.device("cuda")), 1, QUANTS.get(quant))
        assert ops.name.startswith("reference; experts: cpu ")
        there = [each.to("cuda") for each in (x_TE, logits_TX, *more)]
        for sends_first in (False, True):
            if sends_first:
                assert ops.send_expert_inputs is not None
                ops.send_expert_inputs(*there[:2])
            found = ops.experts(layer, *there)
            assert found.device.type == "cuda"
            assert torch.equal(found.cpu(), expected)


def test_a_row_has_the_same_bits_alone_and_beside_others():
    ops = with_host_experts(REFERENCE, HostDevice(), 1, None)
    layer = mixture(ops.host_experts, torch.bfloat16)
    whole = inputs(9, torch.bfloat16)
    together = ops.experts(layer, *whole)
    for row in range(9):
        alone = ops.experts(layer, *(each[row : row + 1] for each in whole))
        assert torch.equal(alone[0], together[row])


def test_nothing_waits_for_the_whole_device():
    ops_of_host = select_host(1, None)
    layer = mixture(ops_of_host, torch.float32)
    with fake_cuda() as cuda:
        ops = with_host_experts(REFERENCE, CudaDevice(torch.device("cuda")), 1, None)
        there = [each.to("cuda") for each in inputs(3, torch.float32)]
        waits, events = len(cuda.queue.waits), cuda.queue.event_waits
        for _ in range(3):
            ops.experts(layer, *there)
        assert cuda.queue.waits[waits:] == []
        assert cuda.queue.event_waits - events == 6, "rows and shared rows of each call"
        cuda.queue.drain(None)


def test_without_the_kernels_it_says_what_to_do(monkeypatch):
    def none(*_):
        raise NativeUnavailable("there is no compiler")

    monkeypatch.setattr("llmbox.engine.device.host_experts.select_host", none)
    with pytest.raises(DeviceError, match="no compiler; load with --cpu-experts off"):
        with_host_experts(REFERENCE, HostDevice(), 1, None)


def test_counts_of_rows_go_on_with_a_shared_expert():
    """Of an undivided mixture too: the counter is the layer's."""
    ops = with_host_experts(REFERENCE, HostDevice(), 1, None)
    load_X = torch.zeros(EXPERTS, dtype=torch.int64)
    layer = replace(mixture(ops.host_experts, torch.float32), load_X=load_X)
    x_TE, logits_TX, shared_TE, _ = inputs(4, torch.float32)
    ops.experts(layer, x_TE, logits_TX)
    ops.experts(layer, x_TE, logits_TX, shared_TE)
    assert int(load_X.sum()) == 2 * 4 * CHOSEN
