"""Single rows of a checkpoint, read without torch, are those that torch reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmbox.engine.checkpoint.index import count_rows, read_row
from llmbox.engine.errors import ModelError
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.tiny_models import VOCAB, make_tiny_model

HEAD = "lm_head"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_rows_of_floats(tmp_path: Path, dtype: str, shards: int) -> None:
    source = make_tiny_model(tmp_path, torch_dtype=dtype, shards=shards)
    whole: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        whole |= load_file(file)
    for row in (0, 7, VOCAB - 1):
        assert read_row(source, HEAD, row) == whole[f"{HEAD}.weight"][row].float().tolist()
    assert count_rows(source, HEAD) == VOCAB
    assert count_rows(source, "score") == 0


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("to", ["int8", "int8-g32", "int4", "int4-mix"])
def test_rows_of_rounded_heads(tmp_path: Path, to: str) -> None:
    """300 inputs: the last group of a row is a short one."""
    source = make_tiny_model(tmp_path / "model", hidden_size=300)
    quantize(source, tmp_path / "out", QUANTS[to], 1, lambda _done, _total: None)
    head = load_file(source / "model.safetensors")[f"{HEAD}.weight"][5]
    found = torch.tensor(read_row(tmp_path / "out", HEAD, 5, QUANTS[to].head))
    assert 0 < (found - head).norm() < 0.01 * head.norm()


def test_what_is_not_there(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"'lm_head.weight' is missing"):
        read_row(source, HEAD, 0)
    with pytest.raises(ModelError, match="has no row 320"):
        read_row(source, "model.embed_tokens", VOCAB)
    with pytest.raises(ModelError, match="has no row 0"):
        read_row(source, "model.norm", 0)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError):
        read_row(source, "model.embed_tokens", 0)
