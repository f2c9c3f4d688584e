"""The language part of a checkpoint that holds a vision tower too."""

from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import ModelRef
from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.gemma_models import make_gemma_that_sees
from support.real_engines import ask, hf_model, hf_tokens, load, tokens

PROMPT = list(range(5, 35))
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma_that_sees(tmp_path_factory.mktemp("sees"))


def rename(model: Path, old: str, new: str) -> None:
    weights = load_file(model / WEIGHTS)
    renamed = {name.replace(old, new) if name.startswith(old) else name: w for name, w in weights.items()}
    save_file(renamed, model / WEIGHTS, metadata={"format": "pt"})


def test_it_answers_as_transformers_do(model: Path) -> None:
    assert tokens(load(model), [ask("a", PROMPT, 24)])["a"] == hf_tokens(hf_model(model), PROMPT, 24)


def test_the_other_style_of_names(model: Path, tmp_path: Path) -> None:
    for file in ("config.json", WEIGHTS):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    rename(tmp_path, "language_model.model.", "model.language_model.")
    for part in ("vision_tower.", "multi_modal_projector."):
        rename(tmp_path, part, f"model.{part}")
    assert tokens(load(tmp_path), [ask("a", PROMPT, 8)]) == tokens(load(model), [ask("a", PROMPT, 8)])


def test_what_it_sees_with_is_not_counted(model: Path) -> None:
    assert sum(prod(entry.shape) for entry in list_tensors(model).values()) == (
        parse_config(model).num_parameters
    )
    facts = local_facts(ModelRef("sees", model, "directory"))
    assert facts.notes == ()


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_its_language_part_is_quantized(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", QUANTS["int8"], 1, lambda _done, _total: None)
    wanted = tokens(load(model, quant="int8"), [ask("a", PROMPT, 8)])
    assert tokens(load(tmp_path / "out"), [ask("a", PROMPT, 8)]) == wanted
    assert not [name for name in list_tensors(tmp_path / "out") if "vision" in name]


def test_a_tensor_in_both_styles_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = load_file(model / WEIGHTS)
    weights["model.language_model.norm.weight"] = torch.zeros(64)
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match="are the same tensor"):
        load(tmp_path)
