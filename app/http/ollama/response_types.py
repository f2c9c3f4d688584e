"""Model descriptions under Ollama's names."""

from typing import Any

from msgspec import Struct

from ...control.model_card import Card
from ...text.output.format_table import recognize_format

_OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}


class Details(Struct, kw_only=True):
    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    """Bytes on disk."""
    digest: str
    details: Details


class Tags(Struct):
    models: list[Listed]


class Running(Struct, kw_only=True):
    name: str
    model: str
    size: int
    """Bytes of memory."""
    digest: str
    details: Details
    expires_at: str
    """Time when the model leaves memory if no request comes; centuries ahead for one that stays."""
    size_vram: int
    """Bytes of `size` that are on GPUs."""
    context_length: int
    """Tokens of prompt and answer together."""


class RunningModels(Struct):
    models: list[Running]


class Shown(Struct, kw_only=True):
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    template: str
    """Jinja, not Go's."""
    parameters: str
    system: str = ""


class OllamaVersion(Struct):
    version: str


def details_of(card: Card, weights: str = "") -> Details:
    """Build a model's details. `weights`: the data type in memory, where that differs from the files."""
    family = card.config.model_type if card.config is not None else ""
    return Details(
        family=family,
        families=[family] if family else [],
        parameter_size=_size(card.parameters),
        quantization_level=(weights or card.stored_as).upper(),
    )


def model_info(card: Card, context: int | None) -> dict[str, Any]:
    """Build `model_info` with GGUF's keys. `context` is the length served here, which may be less than the
    model's.
    """
    config = card.config
    if config is None:
        return {}
    kind = config.model_type
    return {
        "general.architecture": kind,
        "general.parameter_count": config.num_parameters,
        f"{kind}.context_length": context or config.default_context,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.block_count": config.num_layers,
        f"{kind}.attention.head_count": config.num_heads,
        f"{kind}.attention.head_count_kv": config.num_kv_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": config.rope.theta,
        f"{kind}.vocab_size": config.vocab_size,
    }


def capabilities(card: Card) -> list[str]:
    if card.for_vectors:
        return ["embedding"]
    found = ["completion"]
    format_ = recognize_format(card.template)
    if format_.tools is not None:
        found.append("tools")
    if format_.reasoning is not None:
        found.append("thinking")
    return found


def parameters(values: dict[str, float], context: int | None) -> str:
    """Format parameters one a line, as in a Modelfile."""
    told: dict[str, float] = {} if context is None else {"num_ctx": context}
    told |= {_OPTION_NAMES.get(name, name): value for name, value in values.items()}
    return "\n".join(f"{name:<30} {value:g}" for name, value in told.items())


def _size(parameters: int | None) -> str:
    if parameters is None:
        return ""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
