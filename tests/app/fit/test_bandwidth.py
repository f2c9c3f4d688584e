"""A probe of the memory is taken once and kept for this machine."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from llmbox.app.fit import bandwidth
from llmbox.app.fit.bandwidth import Bandwidth, device_bandwidth, probe
from llmbox.engine.hardware.gpus import Gpu
from llmbox.engine.hardware.machine import Cpu, Machine, Memory

MACHINE = Machine(
    Cpu("test", 4, 8, ()), Memory(16_000_000_000, 12_000_000_000, limited_by_cgroup=False), (), "none"
)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads of each probe, all of which find another bandwidth."""
    asked: list[int] = []

    def fake(threads: int) -> Bandwidth:
        asked.append(threads)
        return Bandwidth(best=2e9 * len(asked), typical=1e9 * len(asked), probed_at=1.8e9)

    monkeypatch.setattr(bandwidth, "probe", fake)
    return asked


def test_it_is_probed_once(tmp_path: Path, probes: list[int]):
    file = tmp_path / "state" / "bandwidth.json"
    first = device_bandwidth(MACHINE, "cpu", file)
    assert device_bandwidth(MACHINE, "cpu", file) == first
    assert probes == [4]
    assert device_bandwidth(MACHINE, "cpu", file, 2) != first, "other threads, another probe"
    assert device_bandwidth(MACHINE, "cpu", file) == first
    assert probes == [4, 2]


def test_a_probe_of_a_busy_machine_is_replaced_when_it_is_idle(
    tmp_path: Path, probes: list[int], monkeypatch: pytest.MonkeyPatch
):
    file, idle = tmp_path / "bandwidth.json", bandwidth.probe
    monkeypatch.setattr(bandwidth, "probe", lambda threads: replace(idle(threads), was_busy=True))
    monkeypatch.setattr(bandwidth, "is_busy", lambda _: True)
    first = device_bandwidth(MACHINE, "cpu", file)
    assert device_bandwidth(MACHINE, "cpu", file) == first
    monkeypatch.setattr(bandwidth, "probe", idle)
    monkeypatch.setattr(bandwidth, "is_busy", lambda _: False)
    second = device_bandwidth(MACHINE, "cpu", file)
    assert second != first
    assert device_bandwidth(MACHINE, "cpu", file) == second


def test_asked_anew_on_another_machine_and_from_a_damaged_file(tmp_path: Path, probes: list[int]):
    file = tmp_path / "bandwidth.json"
    first = device_bandwidth(MACHINE, "cpu", file)
    fresh = device_bandwidth(MACHINE, "cpu", file, refresh=True)
    assert fresh != first
    assert device_bandwidth(MACHINE, "cpu", file) == fresh
    moved = replace(MACHINE, cpu=replace(MACHINE.cpu, model="another"))
    assert device_bandwidth(moved, "cpu", file) != fresh
    file.write_bytes(b"{")
    device_bandwidth(MACHINE, "cpu", file)
    assert len(probes) == 4
    kept = msgspec.json.decode(file.read_bytes())
    assert kept["cpu"] == "test"
    assert kept["by_threads"]["4"]["probed_at"] == 1.8e9


def test_a_file_that_cannot_be_written_costs_only_its_use(tmp_path: Path, probes: list[int]):
    (tmp_path / "state").write_text("no folder")
    assert device_bandwidth(MACHINE, "cpu", tmp_path / "state" / "bandwidth.json") is not None
    assert probes == [4]


def test_a_gpu_tells_it(tmp_path: Path, probes: list[int]):
    gpu = Gpu(0, "Test GPU", "GPU-0", 24_000_000_000, 23_000_000_000, 1e12)
    told = device_bandwidth(replace(MACHINE, gpus=(gpu,)), "cuda", tmp_path / "bandwidth.json")
    assert told == Bandwidth(best=1e12, typical=1e12)
    assert probes == []


def test_a_real_probe():
    found = probe(2, size=1 << 22, rounds=3)
    assert 1e8 < found.typical <= found.best < 1e13
