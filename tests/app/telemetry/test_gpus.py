"""What NVML may do to us; none of it is an exception."""

import pytest

from llmbox.app.telemetry.gpus import RETRY_S, GpuReader
from llmbox.app.telemetry.snapshot import NA
from support.fake_nvml import GIB, NUMBERS, FakeGpu, FakeNvml

NOBODY = frozenset[int]()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_whole_reading():
    nvml = FakeNvml([FakeGpu(processes={7: 20 * GIB, 8: 5 * GIB}, throttle=0x04 | 0x01)])
    (gpu,) = GpuReader(nvml).read(frozenset({7})).devices
    assert gpu.name == "NVIDIA H200"
    assert gpu.utilisation == 0.42
    assert (gpu.memory_total, gpu.memory_free) == (140 * GIB, 110 * GIB)
    assert (gpu.memory_ours, gpu.memory_others) == (20 * GIB, 10 * GIB)
    assert (gpu.power, gpu.power_cap) == (412.0, 700.0)
    assert gpu.bandwidth == pytest.approx(4.917e12, rel=1e-3)
    assert gpu.pcie == "gen5 x16"
    assert gpu.pcie_in == 1_500_000.0
    assert gpu.throttle == ("power cap",)
    assert [process.ours for process in gpu.processes] == [True, False]


def test_every_value_may_be_refused():
    nvml = FakeNvml(not_available=frozenset({*NUMBERS, "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetUUID"}))
    (gpu,) = GpuReader(nvml).read(NOBODY).devices
    assert gpu.memory_total == 140 * GIB
    refused = (gpu.utilisation, gpu.temperature, gpu.power, gpu.power_cap, gpu.clock_sm, gpu.pcie_in)
    assert all(value is NA for value in refused)
    assert gpu.pcie == "n/a"


def test_memory_that_the_driver_hides_is_not_told_as_zero():
    hidden_sizes = FakeNvml([FakeGpu(processes={7: None})])
    hidden_processes = FakeNvml([FakeGpu(processes={})])
    for nvml in (hidden_sizes, hidden_processes):
        (gpu,) = GpuReader(nvml).read(frozenset({7})).devices
        assert gpu.memory_ours is NA
        assert gpu.memory_others is NA


def test_a_lost_gpu_is_said_while_the_other_one_works_and_comes_back_later():
    clock = Clock()
    nvml = FakeNvml([FakeGpu(lost=True), FakeGpu()])
    reader = GpuReader(nvml, clock)
    lost, fine = reader.read(NOBODY).devices
    assert "lost" in lost.problem.lower()
    assert lost.memory_total is NA
    assert fine.utilisation == 0.42
    nvml.gpus[0].lost = False
    assert "lost" in reader.read(NOBODY).problem
    assert nvml.inits == 1
    clock.now += RETRY_S
    assert [gpu.problem for gpu in reader.read(NOBODY).devices] == ["", ""]


def test_no_driver_is_no_complaint_but_a_broken_one_is():
    absent = GpuReader(FakeNvml(init_error="NVMLError_LibraryNotFound"))
    assert absent.read(NOBODY).problem == ""
    nvml = FakeNvml(init_error="NVMLError_LibRmVersionMismatch")
    broken = GpuReader(nvml)
    assert "does not answer" in broken.read(NOBODY).problem
    broken.read(NOBODY)
    assert nvml.inits == 1, "a driver that fails is not asked each second"


def test_nvlink_counters_become_rates_and_topology_is_told():
    clock = Clock()
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    reader = GpuReader(nvml, clock)
    first = reader.read(NOBODY)
    assert [(link.first, link.second, link.kind) for link in first.links] == [(0, 1, "NV4")]
    assert first.devices[0].nvlink_in is NA
    nvml.gpus[0].nvlink_bytes += 10 << 20
    clock.now += 2
    assert reader.read(NOBODY).devices[0].nvlink_in == 5 << 20
