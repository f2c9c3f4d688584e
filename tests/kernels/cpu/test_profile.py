"""Time of operations by kind."""

import time

import torch

from llmbox.kernels.dispatch import load_backend


def test_operations_are_counted_by_kind_while_profiling_is_on_and_give_the_same_bits() -> None:
    ops = load_backend("cpu").ops()
    profiler = ops.profiler
    assert profiler is not None
    packed = ops.pack_linear(torch.randn(256, 128), None)
    x, weight = torch.randn(3, 128), torch.randn(128)
    expected = ops.linear(packed, x), ops.rms_norm(x, weight, 1e-6)
    profiler.start(read_rate=1e9, product_rate=1e15)
    began = time.perf_counter()
    got = ops.linear(packed, x), ops.rms_norm(x, weight, 1e-6)
    elapsed = time.perf_counter() - began
    profiler.stop()
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    kinds = {kernel.name: kernel for kernel in profiler.read()}
    assert {name for name, kernel in kinds.items() if kernel.seconds} == {"linears", "norms"}
    assert 0 < profiler.seconds() <= elapsed
    linears = kinds["linears"]
    assert linears.floor == linears.reading == 256 * 128 * 4 / 1e9  # reading bounds it at these rates
    assert 0 <= linears.waited <= linears.seconds
    before = profiler.seconds()
    ops.linear(packed, x)
    assert profiler.seconds() == before


def test_a_start_clears_the_sums_and_rates_bound_products() -> None:
    ops = load_backend("cpu").ops()
    profiler = ops.profiler
    assert profiler is not None
    packed = ops.pack_linear(torch.randn(64, 128), None)
    profiler.start(read_rate=0.0, product_rate=0.0)
    ops.linear(packed, torch.randn(2, 128))
    profiler.start(read_rate=1e15, product_rate=1e6)
    assert profiler.seconds() == 0
    ops.linear(packed, torch.randn(2, 128))
    profiler.stop()
    linears = next(kernel for kernel in profiler.read() if kernel.name == "linears")
    assert (linears.floor, linears.reading) == (64 * 128 * 2 / 1e6, 0)


def test_rates_of_the_machine_are_those_of_packed_weights() -> None:
    backend = load_backend("cpu")
    backend.use_threads([0])
    ops = backend.ops()
    assert ops.profiler is not None
    assert ops.profiler.threads == 1
    assert ops.profiler.read_rate(ops.pack_linear(torch.zeros(64, 1024), None)) > 0
    assert ops.profiler.read_rate(object()) == 0
    assert ops.profiler.product_rate(ops) > 0
