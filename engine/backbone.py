"""Checkpoints of a transformer without its head: they make vectors, or score texts. No torch.

They are loaded as if the head were the embedding: nobody uses it, and it takes no memory. What a model
that scores has instead, `score.weight`, whoever asks for scores reads (`weight_rows.py`).
"""

from pathlib import Path

from .checkpoint import list_tensors
from .config_fields import Fields
from .errors import ModelError
from .pooling_config import is_declared

HEAD = "lm_head.weight"
_WHOLE = "ForCausalLM"
_OTHERS = ("ForSequenceClassification", "Model")
"""Ends of names of the same transformer without it."""


def with_head(architecture: str) -> str:
    """The class that has the head too: `Qwen3ForCausalLM` for `Qwen3Model`."""
    end = next((end for end in _OTHERS if architecture.endswith(end)), None)
    return architecture if end is None else architecture.removesuffix(end) + _WHOLE


def has_head(fields: Fields, directory: Path) -> bool:
    """Where only the files tell, a folder that declares no vectors is expected to have one: without it, it is
    damaged.
    """
    named = fields.raw.get("architectures") or []
    names = named if isinstance(named, list) else [named]
    if any(isinstance(name, str) and name.endswith(_OTHERS) for name in names):
        return False
    if fields.flag("tie_word_embeddings", default=False) or not is_declared(directory):
        return True
    try:
        return HEAD in list_tensors(directory)
    except ModelError:  # loading says why
        return True
