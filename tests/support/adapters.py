"""Adapters of tiny models, as PEFT writes them, and hostile ones."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def make_adapter(model: Any, folder: Path, seed: int = 0, **config: Any) -> Any:
    """Save a random adapter of a transformers model; return PEFT's model, which computes with it."""
    from peft import LoraConfig, get_peft_model

    config = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False, **config}
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    for name, weight in adapted.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            weight.data = torch.randn_like(weight) * 0.2
        if "modules_to_save" in name:
            weight.data = torch.randn_like(weight) * 0.3
        if "magnitude" in name:
            weight.data = weight.data * (1 + 0.2 * torch.rand_like(weight))
    adapted.save_pretrained(folder)
    return adapted.eval()


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write a folder by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def plain_tensors(
    inputs: int = 64, outputs: int = 64, rank: int = 4, name: str = "model.layers.0.self_attn.q_proj"
) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{name}.lora_A.weight": torch.randn(rank, inputs) * 0.1,
        f"base_model.model.{name}.lora_B.weight": torch.randn(outputs, rank) * 0.1,
    }
