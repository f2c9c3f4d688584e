"""Folders of adapters that cannot be read, each with its reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.checkpoint.adapter import AdapterError, read_adapter
from support.adapters import plain_tensors, write_adapter


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', only 'LORA'"),
        ({"r": 10**6}, r"r is 1000000, allowed are 1 to 256"),
        ({"r": 0}, "r is 0, allowed"),
        ({"r": "16"}, "r is '16', allowed"),
        ({"r": True}, "r is True, allowed"),
        ({"r": 8}, r"lora_A.*its rank is 4, but adapter_config.json says 8"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, which is not a valid scale"),
        ({"lora_alpha": None}, "lora_alpha is None, which is not a valid scale"),
        ({"rank_pattern": {"(a+)+$": 4}}, r"rank_pattern has the expression .*regular expressions are not"),
        ({"rank_pattern": [1]}, "rank_pattern is not a table"),
        ({"rank_pattern": {"q_proj": 10**6}}, "allowed are 1 to 256"),
        ({"bias": "all"}, "trained biases are not supported"),
        ({"fan_in_fan_out": True}, "Conv1D"),
        ({"layer_replication": [[0, 2]]}, "layers that are repeated"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
    ],
)
def test_configs(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    folder = write_adapter(tmp_path, plain_tensors(), **config)
    with pytest.raises(AdapterError, match=told):
        read_adapter(folder)


A, B = plain_tensors().items()


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (dict([A]), "has no lora_B: the file is cut short"),
        (dict([B]), "has no lora_A"),
        ({A[0]: A[1], B[0]: torch.zeros(64, 3)}, r"shape \[64, 3\] does not go with \[4, 64\]"),
        ({A[0]: torch.zeros(300, 8), B[0]: torch.zeros(8, 300)}, "its rank is 300, allowed are 1 to 256"),
        ({A[0]: torch.zeros(0, 8), B[0]: torch.zeros(8, 0)}, "its rank is 0, allowed"),
        ({A[0]: A[1].to(torch.int8), B[0]: B[1]}, "dtype I8 is not supported"),
        ({"base_model.model.model.x.ia3_l": torch.zeros(2)}, "not part of a LoRA adapter"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}, "modules_to_save"),
        (
            {**dict([A, B]), "model.layers.0.self_attn.q_proj.lora_A.weight": A[1].clone()},
            "another tensor",
        ),
    ],
)
def test_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor], told: str) -> None:
    with pytest.raises(AdapterError, match=told):
        read_adapter(write_adapter(tmp_path, tensors))


def test_files(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not a folder"):
        read_adapter(tmp_path / "missing")
    with pytest.raises(AdapterError, match="cannot be read: File name too long"):
        read_adapter(tmp_path / ("x" * 300))
    with pytest.raises(AdapterError, match=r"has no adapter_config.json, which PEFT writes"):
        read_adapter(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AdapterError, match="it is a whole model"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path / "a", plain_tensors())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"a pickle, which can run code.*safe_serialization=True"):
        read_adapter(folder)
    (folder / "adapter_model.bin").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x04" + bytes(40))
    with pytest.raises(AdapterError, match="not a safetensors file"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("[" * 100)
    with pytest.raises(AdapterError, match="not valid JSON"):
        read_adapter(folder)


def test_names_within_larger_models(tmp_path: Path) -> None:
    """Whoever trained the language model of a larger one."""
    tensors = plain_tensors(name="model.language_model.layers.0.self_attn.q_proj")
    adapter = read_adapter(write_adapter(tmp_path, tensors, lora_alpha=2))
    (target,) = adapter.targets.values()
    assert (target.name, target.scale) == ("model.layers.0.self_attn.q_proj", 0.5)
