"""How GPUs are told to be divided and joined: slices (MIG), links of some pairs only, devices that refuse."""

import sys
from dataclasses import replace

import pynvml
import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware import machine as machine_module
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from support.fake_nvml import GIB, FakeGpu, FakeNvml
from support.shapes import LLAMA_3_8B

CONFIG = EngineConfig(model_path="none", name="m")


class Box(FakeNvml):
    """GPUs by name; `divided`: memory of the slices of some; `joined`: pairs of NVLink peers."""

    def __init__(self, count, divided=None, joined=(), **options):
        super().__init__(
            gpus=[FakeGpu(name=f"gpu {n}", total=80 * GIB, used=0) for n in range(count)], **options
        )
        self.slices = {
            index: [
                FakeGpu(name=f"gpu {index} slice {n}", total=size, used=GIB) for n, size in enumerate(sizes)
            ]
            for index, sizes in (divided or {}).items()
        }
        self.joined = {frozenset(pair) for pair in joined}
        self.refuses = set()
        """Devices that answer no question about links."""

    @property
    def uuids(self):
        named = {f"GPU-{index}aa": gpu for index, gpu in enumerate(self.gpus)}
        return named | {f"MIG-{i}-{n}": gpu for i, all_ in self.slices.items() for n, gpu in enumerate(all_)}

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802 - NVML's name
        found = self.uuids.get(uuid)
        if found is None:
            raise pynvml.NVMLError_NotFound
        return found

    def _answers(self, name, gpu, arguments):
        match name:
            case "nvmlDeviceGetUUID":
                return next(uuid for uuid, each in self.uuids.items() if each is gpu)
            case "nvmlDeviceGetMigMode":
                return [int(self.gpus.index(gpu) in self.slices)] * 2
            case "nvmlDeviceGetMaxMigDeviceCount":
                return 7
            case "nvmlDeviceGetMigDeviceHandleByIndex":
                parts = dict(enumerate(self.slices[self.gpus.index(gpu)], 1))  # the first number is free
                if arguments[0] not in parts:
                    raise pynvml.NVMLError_NotFound
                return parts[arguments[0]]
            case "nvmlDeviceGetP2PStatus":
                pair = frozenset((gpu.name, arguments[0].name))
                if pair & self.refuses:
                    raise pynvml.NVMLError_InvalidArgument
                known = {frozenset(f"gpu {n}" for n in each) for each in self.joined}
                return 0 if pair in known else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return super()._answers(name, gpu, arguments)


@pytest.fixture
def see(monkeypatch):
    def see(box, visible=None):
        monkeypatch.setitem(sys.modules, "pynvml", box)
        monkeypatch.setattr(machine_module, "torch_has_cuda", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return read_machine()

    return see


def names(machine):
    return [gpu.name for gpu in machine.gpus]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["gpu 1 slice 0"]),
        ("MIG-1-1", ["gpu 1 slice 1"]),
        ("MIG-1-1,MIG-1-0", ["gpu 1 slice 1"]),
        ("1", ["gpu 1 slice 0"]),
        ("0,1", ["gpu 1 slice 0"]),
        ("0", ["gpu 0"]),
        ("GPU-2", ["gpu 2"]),
        ("2,0", ["gpu 2", "gpu 0"]),
        ("MIG-9", []),
    ],
)
def test_of_divided_gpus_one_slice_is_seen_and_nothing_beside_it(see, visible, seen):
    machine = see(Box(3, divided={1: [10 * GIB, 20 * GIB]}), visible)
    assert names(machine) == seen
    assert [gpu.index for gpu in machine.gpus] == list(range(len(seen)))
    assert bool(seen) == (machine.no_gpu_reason is None)


def test_a_slice_has_its_own_memory_and_is_never_cut_among(see):
    machine = see(Box(2, divided={0: [40 * GIB, 40 * GIB], 1: [40 * GIB]}, joined=[(0, 1)]))
    (part,) = machine.gpus
    assert (part.total, part.free, part.bandwidth) == (40 * GIB, 39 * GIB, None)
    assert machine.nvlink == ()
    plan = estimate(LLAMA_3_8B, MemoryBudget.of(machine, "cuda"), CONFIG)
    assert (plan.tp, plan.pp, plan.gpus) == (1, 1, (0,))


@pytest.mark.parametrize("refused", ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"])
def test_cards_that_cannot_be_divided_are_whole(see, refused):
    machine = see(Box(2, divided={0: [GIB]}, not_available=frozenset({refused})))
    assert names(machine) == ["gpu 0", "gpu 1"]
    assert all(gpu.bandwidth for gpu in machine.gpus)


def test_a_device_that_refuses_to_tell_of_links_leaves_the_others_joined(see):
    box = Box(4, joined=[(0, 1), (0, 2), (1, 2), (2, 3)])
    assert see(box).nvlink == (frozenset({0, 1, 2}),)
    box.refuses = {"gpu 0"}
    assert see(box).nvlink == (frozenset({1, 2}),)


def test_pairs_switches_and_slots_choose_tp_or_pp(see):
    """From what the driver says to the cut, for a model that takes two GPUs."""

    def cut(box):
        have = replace(MemoryBudget.of(see(box), "cuda"), available=12 * GIB, more_gpus=(12 * GIB,) * 3)
        plan = estimate(LLAMA_3_8B, have, CONFIG)
        return plan.tp, plan.pp, plan.gpus

    pairs, switch = [(0, 2), (1, 3)], [(a, b) for a in range(4) for b in range(a)]
    assert cut(Box(4, joined=pairs)) == (2, 1, (0, 2))
    assert cut(Box(4, joined=switch)) == (2, 1, (0, 1))
    assert cut(Box(4)) == (1, 2, (0, 1))
