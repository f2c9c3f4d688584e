"""Models of the soak beside the built-in one: small, random, made anew in each folder.

`tiny` with two LoRA adapters, `eye`, which sees pictures, and `big`, beside which not all others fit.
"""

import base64
import io
from pathlib import Path

import torch

from support.adapters import plain_tensors, write_adapter
from support.tiny_models import make_tiny_model
from support.vision_models import draw_picture, make_seeing_chat_model

ADAPTERS = ("pirate", "poet")
SETTINGS = """
[memory]
budget = 0.3

[cache]
kv_disk_gb = 1.0

[model]
threads = 1
kv_tokens = 16384
lora_memory = 0.02
overrides = ["big:ctx=180000", "big:kv_tokens=180000"]
"""
"""Room for all but `big`, or for `big` and one other: it needs the KV cache of one whole context."""


def make_models(folder: Path) -> dict[str, Path]:
    """Write the models. Returns their folders by name."""
    made = {"eye": make_seeing_chat_model(folder / "eye")}
    for number, (name, context) in enumerate((("tiny", 1024), ("big", 180_000))):
        made[name] = make_tiny_model(folder / name, seed=number, max_position_embeddings=context)
    return made


def make_adapters(folder: Path) -> dict[str, Path]:
    """Write adapters of `tiny`. Returns their folders by name."""
    made = {}
    for number, name in enumerate(ADAPTERS):
        torch.manual_seed(number)
        made[name] = write_adapter(folder / name, {key: 6 * each for key, each in plain_tensors().items()})
    return made


def picture_url() -> str:
    """Return a small picture as a `data:` URL."""
    stream = io.BytesIO()
    draw_picture(64, 48).save(stream, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
