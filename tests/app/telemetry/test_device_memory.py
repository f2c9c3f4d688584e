"""Who holds what on each device, out of made-up ticks."""

import pytest

from llmbox.app.telemetry.device_memory import devices_of
from llmbox.app.telemetry.snapshot import NA, GpuProcess, Gpus
from support.snapshots import GB, engine, failing_tick, gpu, idle_tick, tick


def named(tick):
    return {device.name: device for device in devices_of(tick)}


def test_parts_and_what_is_free_make_up_the_device():
    first, second, ram = devices_of(tick())
    assert (first.name, second.name, ram.name) == ("GPU 0", "GPU 1", "RAM")
    assert first.models == ["qwen3-8b"]
    kv = sum(first.of("qwen3-8b", kind) for kind in ("live", "cached", "kv_free"))
    assert kv == pytest.approx(60 * GB)
    assert first.of("", "others") == 4 * GB
    assert second.models == []


def test_ranks_are_found_by_their_processes_or_counted_from_the_first():
    two = engine(pids=(7, 8), device="cuda:0")
    processes = [GpuProcess(pid=pid, memory=1.0, ours=True) for pid in (8, 7)]
    gpus = [gpu(0), gpu(1, processes=(processes[0],)), gpu(2, processes=(processes[1],))]
    found = named(tick(gpus=Gpus(devices=tuple(gpus)), engines=(two,)))
    assert found["GPU 0"].models == []
    assert found["GPU 1"].of("qwen3-8b", "weights") == found["GPU 2"].of("qwen3-8b", "weights") == 8 * GB
    hidden = named(tick(gpus=Gpus(devices=(gpu(0), gpu(1), gpu(2))), engines=(two,)))
    assert [hidden[f"GPU {n}"].of("qwen3-8b", "weights") for n in range(3)] == [8 * GB, 8 * GB, 0]


def test_what_is_not_known_is_said():
    silent = gpu(memory_ours=NA, memory_others=NA)
    lost = gpu(1, problem="GPU is lost")
    first, second, _ = devices_of(tick(gpus=Gpus(devices=(silent, lost)), engines=()))
    assert "does not tell" in first.note
    assert first.of("", "others") == 90 * GB  # total less free
    assert (second.problem, second.parts) == ("GPU is lost", ())


def test_a_box_without_gpus_has_its_memory():
    (ram,) = devices_of(idle_tick())
    assert ram.of("", "others") == pytest.approx(81 * GB)
    assert devices_of(failing_tick())[0].models == ["qwen3-8b"]
