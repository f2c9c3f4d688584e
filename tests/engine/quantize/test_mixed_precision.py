"""Mixed formats: which linears have more bits, and that load, estimate and checkpoint agree on it."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.shape import is_fine
from llmbox.engine.planning.memory_model import weights_bytes
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

NATIVE = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
MIX = QUANTS["int4-mix"]


def fine(layers: int) -> list[int]:
    return [n for n in range(layers) if is_fine(f"model.layers.{n}.mlp.down_proj", layers)]


def test_the_ends_and_every_third_layer_between() -> None:
    assert fine(28) == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 25, 26, 27]
    assert fine(4) == [0, 3]
    assert [fine(1), fine(2)] == [[0], [0, 1]]
    assert not is_fine("model.layers.0.mlp.up_proj", 28)
    assert not is_fine("model.layers.0.mlp.gate_proj+model.layers.0.mlp.up_proj", 28)
    assert not is_fine("lm_head", 28)


def test_the_estimate_counts_them(tmp_path: Path) -> None:
    shape = parse_config(make_tiny_model(tmp_path / "model")).shape()
    shape = replace(shape, layers=28, mlp_layers=28, exact_params=None)
    four, mix = (weights_bytes(shape, "bfloat16", QUANTS[name]) for name in ("int4", "int4-mix"))
    assert mix - four == 13 * shape.hidden * shape.ffn * (8.125 - 4.625) / 8


@NATIVE
@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_checkpoint_and_load_hold_the_same_integers(tmp_path: Path, arch: str) -> None:
    """Odd sizes: neither two nor a group divide the inputs."""
    source = make_tiny_model(
        tmp_path / "model", arch=arch, intermediate_size=77, hidden_size=72, num_hidden_layers=4
    )
    quantize(source, tmp_path / "out", MIX, 1, lambda _done, _total: None)
    stored = load_file(tmp_path / "out/model.safetensors")
    kinds = [str(stored[f"model.layers.{n}.mlp.down_proj.weight"].dtype) for n in range(4)]
    assert kinds == ["torch.int8", "torch.uint8", "torch.uint8", "torch.int8"]
    assert str(stored["model.layers.0.mlp.up_proj.weight"].dtype) == "torch.uint8"

    def answer(model: Path, **options: str) -> list[int]:
        return tokens(load(model, **options), [ask("a", list(range(5, 25)), 8)])["a"]

    assert answer(tmp_path / "out") == answer(source, quant="int4-mix")
