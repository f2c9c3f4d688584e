import os
import sys
from types import SimpleNamespace

import pytest

from llmbox.engine.hardware import machine
from llmbox.engine.hardware.gpus import name_gpus, read_gpus
from llmbox.engine.hardware.machine import (
    cpu_quota,
    memory_left,
    memory_limit,
    read_cpu,
    read_machine,
    read_memory,
)

# ---------------------------------------------------------------------------- this machine


def test_this_machine():
    here = read_machine()
    assert 1 <= here.cpu.cores <= here.cpu.threads == len(os.sched_getaffinity(0))
    assert here.cpu.model
    assert 0 < here.memory.available <= here.memory.total
    assert bool(here.gpus) != bool(here.no_gpu_reason)


def test_affinity_and_hyper_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_SYS_CPU", tmp_path)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    for cpu, core in ((0, 0), (1, 0), (2, 1), (5, 1)):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(f"{core}\n")
        (topology / "physical_package_id").write_text("1\n" if cpu == 5 else "0\n")
    cpu = read_cpu()
    assert (cpu.cores, cpu.threads) == (3, 4)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    assert read_cpu().cores == 1
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.2)
    assert read_cpu().cores == 1


def test_a_cgroup_limit_bounds_the_memory(monkeypatch):
    monkeypatch.setattr(machine, "memory_left", lambda: 1000)
    monkeypatch.setattr(machine, "memory_limit", lambda: 1500)
    assert read_memory() == machine.Memory(1500, 1000, limited_by_cgroup=True)
    monkeypatch.setattr(machine, "memory_left", lambda: 10**18)
    assert not read_memory().limited_by_cgroup


# ---------------------------------------------------------------------------- cgroups


def write(root, **files):
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def membership(tmp_path):
    file = tmp_path / "self_cgroup"
    file.write_text("0::/user.slice/box\n")
    return file


def test_version_2_tightest_ancestor_counts(tmp_path, membership):
    root = tmp_path / "fs"
    write(
        root / "user.slice" / "box",
        memory__max=1000,
        memory__current=300,
        memory__stat="anon 1\ninactive_file 50",
    )
    assert (memory_left(root, membership), memory_limit(root, membership)) == (750, 1000)
    write(root / "user.slice", memory__max=900, memory__current=600)
    assert (memory_left(root, membership), memory_limit(root, membership)) == (300, 900)
    write(root / "user.slice", memory__max=900, memory__current=2000)
    assert memory_left(root, membership) == 0


def test_version_2_in_a_container(tmp_path):
    """A cgroup namespace shows '/' and the group's own files at the root."""
    file = tmp_path / "self_cgroup"
    file.write_text("0::/\n")
    write(tmp_path / "fs", memory__max=500, memory__current=100, cpu__max="150000 100000")
    assert memory_left(tmp_path / "fs", file) == 400
    assert cpu_quota(tmp_path / "fs", file) == 1.5


def test_version_1(tmp_path):
    file = tmp_path / "self_cgroup"
    file.write_text("9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    write(
        tmp_path / "fs" / "memory" / "job",
        memory__limit_in_bytes=800,
        memory__usage_in_bytes=500,
        memory__stat="cache 9\ntotal_inactive_file 100",
    )
    assert (memory_left(tmp_path / "fs", file), memory_limit(tmp_path / "fs", file)) == (400, 800)


def test_no_limits(tmp_path, membership):
    root = tmp_path / "fs"
    assert memory_left(root, membership) is None
    assert cpu_quota(root, membership) is None
    assert memory_left(root, tmp_path / "absent") is None
    write(root / "user.slice" / "box", memory__max="max", memory__current=5, cpu__max="max 100000")
    assert memory_left(root, membership) is memory_limit(root, membership) is None
    assert cpu_quota(root, membership) is None


# ---------------------------------------------------------------------------- gpus


class NVMLError(Exception):
    pass


def fake_nvml(count=2, **changes):
    def fail(*_):
        raise NVMLError("Unknown Error")

    calls = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_MEM": 2,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}aaaa".encode(),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100, free=90 - handle),
        "nvmlDeviceGetMemoryBusWidth": lambda _: 384,
        "nvmlDeviceGetMaxClockInfo": lambda *_: 10501,
        "nvmlDeviceGetCudaComputeCapability": lambda _: (8, 9),
    }
    return SimpleNamespace(**{**calls, **{name: change or fail for name, change in changes.items()}})


@pytest.fixture
def gpus(monkeypatch):
    def read(visible=None, **nvml):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**nvml))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return read_gpus()

    return read


def test_gpu_facts(gpus):
    found, reason = gpus()
    assert reason is None
    assert [(gpu.index, gpu.name, gpu.uuid, gpu.free) for gpu in found] == [
        (0, "GPU 0", "GPU-0aaaa", 90),
        (1, "GPU 1", "GPU-1aaaa", 89),
    ]
    assert found[0].bandwidth == pytest.approx(1008e9, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "has_cuda"),
    [
        ("cuda: Optional[str] = None", False),
        ("cuda = None", False),
        ("cuda: Optional[str] = '13.0'", True),
        ("", True),
    ],
)
def test_a_pytorch_without_cuda_leaves_gpus_alone(gpus, monkeypatch, tmp_path, line, has_cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\n{line}\ncuda_other = None\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(machine, "find_spec", lambda _: spec)
    machine.torch_has_cuda.cache_clear()
    assert len(gpus(count=1)[0]) == 1
    found = machine.read_machine()
    machine.torch_has_cuda.cache_clear()
    assert bool(found.gpus) == has_cuda
    assert found.no_gpu_reason == (None if has_cuda else machine.NO_CUDA)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["GPU 1"]),
        ("1,0", ["GPU 1", "GPU 0"]),
        ("GPU-1", ["GPU 1"]),
        ("0,7,1", ["GPU 0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices(gpus, visible, names):
    found, reason = gpus(visible)
    assert [gpu.name for gpu in found] == names
    assert [gpu.index for gpu in found] == list(range(len(names)))
    assert bool(names) == (reason is None)


def test_the_fastest_memory_comes_first_where_nobody_chose(gpus):
    """As a small card for screens often has the first slot."""
    widths = [64, 384, 384]
    unequal = {"count": 3, "nvmlDeviceGetMemoryBusWidth": widths.__getitem__}
    assert [gpu.name for gpu in gpus(**unequal)[0]] == ["GPU 1", "GPU 2", "GPU 0"]
    assert [gpu.name for gpu in gpus("0,1", **unequal)[0]] == ["GPU 0", "GPU 1"]


@pytest.mark.parametrize(
    ("visible", "named"), [(None, "1 2 0"), ("2,0", "2 0"), ("GPU-0", "0"), ("2,9", "2")]
)
def test_cuda_is_told_which_gpus_there_are_in_which_order(gpus, monkeypatch, visible, named):
    """Its own order is another one: what is measured here would run there on another card."""
    options = {"count": 3, "nvmlDeviceGetMemoryBusWidth": [64, 384, 384].__getitem__}
    found, _ = gpus(visible, **options)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # to be put back
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    name_gpus()
    told = os.environ["CUDA_VISIBLE_DEVICES"]
    assert told == ",".join(f"GPU-{number}aaaa" for number in named.split())
    assert gpus(told, **options)[0] == found, "and whoever is started from here sees the same"


def test_where_no_gpu_is_seen_cuda_is_told_nothing(gpus):
    gpus("7", count=1)
    name_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_unknown_bandwidth(gpus):
    assert gpus(nvmlDeviceGetMemoryBusWidth=None)[0][0].bandwidth is None


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_a_failing_driver_means_no_gpu_and_a_reason(gpus, call):
    found, reason = gpus(**{call: None})
    assert found == ()
    assert "Unknown Error" in reason


def test_a_lost_gpu_takes_no_other_with_it(gpus):
    def memory(handle):
        if handle == 1:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(total=100, free=90)

    found, reason = gpus(count=3, nvmlDeviceGetMemoryInfo=memory)
    assert [gpu.name for gpu in found] == ["GPU 0", "GPU 2"]
    assert reason is None
    found, _ = gpus("2,0", count=3, nvmlDeviceGetMemoryInfo=memory)
    assert [gpu.name for gpu in found] == ["GPU 2", "GPU 0"], "by the numbers of nvidia-smi, as before"
