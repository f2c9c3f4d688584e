"""One file an architecture, named as the checkpoint's `model_type`, holding only its wiring."""

from collections.abc import Callable

from ..layers.decoder import Decoder
from ..model_config import ModelConfig
from ..weights import Source
from .llama import llama
from .mistral import mistral
from .qwen2 import qwen2
from .qwen3 import qwen3

MODELS: dict[str, Callable[[ModelConfig, Source], Decoder]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def build_model(config: ModelConfig, source: Source) -> Decoder:
    return MODELS[config.model_type](config, source)
