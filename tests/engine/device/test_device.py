"""GPUs are numbered as CUDA does it: by NVML's numbers a model would go to another card."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from llmbox.engine.config import EngineConfig
from llmbox.engine.device import device as devices
from llmbox.engine.device.device import cuda_machine, in_order
from llmbox.engine.executor import build as loader
from llmbox.engine.hardware.gpus import Gpu
from llmbox.engine.hardware.machine import Machine, read_machine
from llmbox.engine.planning.estimator import estimate
from llmbox.engine.planning.memory_model import CUDA_CONTEXT
from support.shapes import LLAMA_3_8B


def machine(*uuids, nvlink=()):
    gpus = tuple(Gpu(n, f"card {uuid[-1]}", uuid, 100, 90, None) for n, uuid in enumerate(uuids))
    return replace(read_machine(), gpus=gpus, nvlink=tuple(frozenset(each) for each in nvlink))


def named(found: Machine) -> list[str]:
    assert [gpu.index for gpu in found.gpus] == list(range(len(found.gpus)))
    return [gpu.name for gpu in found.gpus]


def test_the_fastest_comes_first_and_its_links_with_it():
    box = machine("GPU-a", "GPU-b", "GPU-c", "GPU-d", nvlink=[(0, 1), (2, 3)])
    found = in_order(box, ["c", "a", "b", "D"])
    assert named(found) == ["card c", "card a", "card b", "card d"]
    assert set(found.nvlink) == {frozenset({1, 2}), frozenset({0, 3})}


def test_what_cuda_does_not_see_is_not_there():
    found = in_order(machine("GPU-a", "GPU-b", "GPU-c", nvlink=[(0, 1, 2)]), ["b", "a"])
    assert named(found) == ["card b", "card a"]
    assert found.nvlink == (frozenset({0, 1}),)
    assert in_order(machine("GPU-a", "GPU-b", nvlink=[(0, 1)]), ["b"]).nvlink == ()
    assert named(in_order(machine("MIG-a"), ["a"])) == ["card a"]


@pytest.mark.parametrize("uuids", [[], ["", ""], ["a", "z"]])
def test_names_that_nobody_knows_change_nothing(uuids):
    box = machine("GPU-a", "GPU-b", nvlink=[(0, 1)])
    assert in_order(box, uuids) is box
    assert in_order(machine(), uuids).gpus == ()


@pytest.mark.parametrize(("told", "first"), [({"uuid": "b"}, "card b"), ({}, "card a")])
def test_torch_is_asked(monkeypatch, told, first):
    monkeypatch.setattr(devices, "read_machine", lambda: machine("GPU-a", "GPU-b"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _number: SimpleNamespace(**told))
    assert named(cuda_machine())[0] == first


@pytest.mark.parametrize(("count", "free", "opened"), [(0, 70 + CUDA_CONTEXT, 1), (1, 90, 0), (2, 90, 0)])
def test_no_gpu_is_opened_to_measure_it_where_nvml_tells(monkeypatch, count, free, opened):
    """A context takes memory where it is, and the model may go to another GPU."""
    asked = []
    monkeypatch.setattr(loader, "cuda_machine", lambda: machine(*["GPU-a", "GPU-b"][:count]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (70, 100))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = loader.memory_budget(torch.device("cuda"))
    assert (found.available, len(found.more_gpus)) == (free, max(0, count - 1))
    assert len(asked) == opened


def test_without_nvml_cuda_tells_of_the_other_gpus(monkeypatch):
    """Several ranks can be asked for, and are chosen in stages where one GPU is too small."""
    monkeypatch.setattr(loader, "cuda_machine", machine)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (12 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=(12 + number) << 30)
    )
    found = loader.memory_budget(torch.device("cuda"))
    assert (found.more_gpus, found.nvlink) == ((13 << 30, 14 << 30), ())
    asked = EngineConfig(model_path="none", name="m", tp=2)
    assert estimate(LLAMA_3_8B, found, asked).gpus == (0, 1)
    alone = estimate(LLAMA_3_8B, found, EngineConfig(model_path="none", name="m"))
    assert (alone.tp, alone.pp, alone.gpus) == (1, 2, (0, 1))
