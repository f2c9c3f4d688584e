"""One file an architecture, named as the checkpoint's `model_type`, holding only its wiring."""

from collections.abc import Callable

from llmbox.kernels.quant_formats import Quant

from ..model.decoder import Decoder
from ..model_config.config import ModelConfig
from ..weights.mixed_precision import MixedPrecisionSource
from ..weights.source import WeightSource
from .gemma import gemma
from .gemma2 import gemma2
from .gemma3_text import gemma3_text
from .granite import granite
from .llama import llama
from .mistral import mistral
from .mixtral import mixtral
from .olmo2 import olmo2
from .olmo3 import olmo3
from .phi3 import phi3
from .qwen2 import qwen2
from .qwen3 import qwen3
from .qwen3_moe import qwen3_moe
from .smollm3 import smollm3

MODELS: dict[str, Callable[[ModelConfig, WeightSource], Decoder]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "phi3": phi3,
    "smollm3": smollm3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "granite": granite,
}


def build_model(config: ModelConfig, source: WeightSource, quant: Quant | None = None) -> Decoder:
    if quant is not None and quant.is_mixed:
        source = MixedPrecisionSource(source, config.num_layers)
    return MODELS[config.model_type](config, source)
