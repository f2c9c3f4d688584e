"""GPU models by their data sheets: names, units and what the planner takes from them."""

import pytest

from llmbox.engine.hardware.gpus import GPU_MODELS, GpuModel, find_gpu_model
from llmbox.engine.hardware.machine import make_gpu_machine
from llmbox.engine.planning.memory_plan import MemoryBudget
from llmbox.kernels.support import FLOAT8_SINCE, TRITON_SINCE


@pytest.mark.parametrize("model", GPU_MODELS.values(), ids=lambda model: model.name)
def test_a_model_is_consistent(model: GpuModel) -> None:
    assert find_gpu_model(model.name) is find_gpu_model(model.name.upper()) is model
    assert model.capability >= TRITON_SINCE
    assert (model.float8 is not None) == (model.capability >= FLOAT8_SINCE)
    assert model.float32 < model.float16 < model.int8 <= 4 * model.float16
    assert model.float8 is None or model.float16 < model.float8 <= model.int8
    # A card reads all of its memory in 5 to 100 ms: a wrong unit would be off by a thousand.
    assert 0.005 < model.memory / model.bandwidth < 0.1


def test_memory_is_binary_and_bandwidth_decimal() -> None:
    model = GPU_MODELS["h100"]
    assert model.memory == 80 * 2**30
    assert model.bandwidth == 3.35e12
    assert model.flops("bfloat16") == model.flops("float16") == 989e12
    assert model.flops("float8") == 1979e12
    assert GPU_MODELS["rtx3090"].flops("float8") == GPU_MODELS["rtx3090"].flops("bfloat16")


@pytest.mark.parametrize("text", ["RTX 4090", "rtx-4090", "Rtx_4090", "rtx4090"])
def test_names_are_found_as_people_write_them(text: str) -> None:
    assert find_gpu_model(text) is GPU_MODELS["rtx4090"]


@pytest.mark.parametrize("text", ["", " ", "rtx", "4090", "h100,h200", "h1000"])
def test_other_names_are_not_guessed(text: str) -> None:
    assert find_gpu_model(text) is None


def test_several_cards_are_peers_where_they_have_nvlink() -> None:
    budget = MemoryBudget.of(make_gpu_machine(GPU_MODELS["h100"], 4), "cuda")
    assert budget.available == 80 * 2**30
    assert len(budget.more_gpus) == 3
    assert budget.nvlink == (frozenset(range(4)),)
    assert budget.capabilities == ((9, 0),) * 4
    alone, without_links = make_gpu_machine(GPU_MODELS["h100"]), make_gpu_machine(GPU_MODELS["rtx4090"], 2)
    assert alone.nvlink == without_links.nvlink == ()
