"""What is particular to each architecture in a GGUF file, as data. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from .names import LAYER, SANDWICH


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    name: str
    """In `architectures` of config.json."""
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    """Names in a layer: of a checkpoint, and of GGUF."""
    has_pairs: bool = False
    """Numbers of queries and keys that rotate together are neighbours, and not half a head apart."""
    norms_hold_one: bool = False
    """Norms are stored as 1 + w."""


ARCHITECTURES: Final = {
    "llama": GgufArchitecture(name="LlamaForCausalLM", model_type="llama", has_pairs=True),
    "qwen2": GgufArchitecture(name="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GgufArchitecture(name="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": GgufArchitecture(name="Qwen3MoeForCausalLM", model_type="qwen3_moe"),
    "smollm3": GgufArchitecture(name="SmolLM3ForCausalLM", model_type="smollm3", has_pairs=True),
    "gemma": GgufArchitecture(name="GemmaForCausalLM", model_type="gemma", norms_hold_one=True),
    "gemma2": GgufArchitecture(
        name="Gemma2ForCausalLM", model_type="gemma2", layer=SANDWICH, norms_hold_one=True
    ),
    "gemma3": GgufArchitecture(
        name="Gemma3ForCausalLM", model_type="gemma3_text", layer=SANDWICH, norms_hold_one=True
    ),
}
"""By GGUF's name for it. Mistral and Mixtral are called llama."""
